"""Evaluate stage."""

from kfp import dsl

from baton.kfp.component import component


@component
def evaluate(baton: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Measures the model on held-out rows and lets it write, before and after training.

    Args:
        baton: The run.
        metrics: The run's figures: loss, perplexity, accuracy or reward before and after, tokens, pace and digest.

    Returns:
        The baton.
    """
    from baton import events
    from baton.evaluate.evaluate import evaluate_run, evaluation_card
    from baton.runs.ref import RunRef
    from baton.runs.run import Run

    with events.stage("evaluate"):
        run_uri = RunRef.read(baton).run_uri
        evaluation = evaluate_run(run_uri)
        evaluation_card(Run.open(run_uri), evaluation).write_metadata(metrics)
    return baton
