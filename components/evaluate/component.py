"""Evaluate stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def evaluate(run_uri: str, checkpoint_uri: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Measures the model on held-out rows and lets it write, before and after training.

    Args:
        run_uri: Address of the run.
        checkpoint_uri: What this stage waits for: the last chunk's checkpoint.
        metrics: Loss, perplexity, accuracy or reward, before and after.

    Returns:
        The figures that say most, in words.
    """
    from baton.components.evaluate.evaluation import evaluate_run
    from baton.components.shared.core import events

    with events.stage("evaluate"):
        evaluation = evaluate_run(run_uri)
        for when in ("before", "after"):
            for name, value in evaluation[when].items():
                metrics.log_metric(f"{name}_{when}", value)
    return evaluation["summary"]
