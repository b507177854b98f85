"""Evaluate stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def evaluate(baton: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Measures the model on held-out rows and lets it write, before and after training.

    Args:
        baton: The run.
        metrics: The run's figures: loss, perplexity, accuracy or reward before and after, tokens, pace and digest.

    Returns:
        The baton.
    """
    from baton.components.evaluate.card import card
    from baton.components.evaluate.evaluation import evaluate_run
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton
    from baton.components.shared.runs.run import Run

    with events.stage("evaluate"):
        run_uri = Baton.read(baton).run_uri
        evaluation = evaluate_run(run_uri)
        card(Run.open(run_uri), evaluation).tell(metrics)
    return baton
