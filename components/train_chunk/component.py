"""Train-chunk stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def train_chunk(run_uri: str, index: int, previous: str, cache_key: str, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Trains a run to the target of a chunk, from the newest valid checkpoint there is.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1.
        previous: What this chunk waits for; not read.
        cache_key: Changes when something is gone that a finished stage had left; not read.
        metrics: Step reached, and the first digits of the digest of the state.

    Returns:
        Address of the checkpoint.
    """
    from baton.components.shared.core import events

    with events.stage(f"train chunk {index}"):
        from baton.components.train_chunk import attempts

        outcome = attempts.run(run_uri, index)
        metrics.log_metric("step", outcome.step)
        metrics.log_metric("digest", outcome.digest[:12])
    return outcome.uri
