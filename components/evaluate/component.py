"""Evaluate stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def evaluate(run_uri: str, checkpoint_uri: str, metrics: dsl.Output[dsl.Metrics]) -> float:
    """Measures held-out loss and writes samples, before and after training.

    Args:
        run_uri: Address of the run.
        checkpoint_uri: What this stage waits for: the last chunk's checkpoint.
        metrics: Loss and perplexity, before and after.

    Returns:
        Held-out loss of the trained model, in nats per token.
    """
    from components.evaluate.evaluation import evaluate_run
    from components.shared import events

    with events.stage("evaluate"):
        found = evaluate_run(run_uri)
        for when in ("before", "after"):
            metrics.log_metric(f"loss_{when}", found[when]["loss"])
            metrics.log_metric(f"perplexity_{when}", found[when]["perplexity"])
    return found["after"]["loss"]
