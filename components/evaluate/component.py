"""Evaluate stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def evaluate(baton: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Measures the model on held-out rows and lets it write, before and after training.

    Args:
        baton: The run.
        metrics: Loss, perplexity, accuracy or reward, before and after.

    Returns:
        The baton.
    """
    from baton.components.evaluate.evaluation import evaluate_run
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton

    with events.stage("evaluate"):
        evaluation = evaluate_run(Baton.read(baton).run_uri)
        for when in ("before", "after"):
            for name, value in evaluation[when].items():
                metrics.log_metric(f"{name}_{when}", value)
    return baton
