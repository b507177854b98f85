"""Checkpoint stage."""

from kfp import dsl


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def checkpoint(
    run_uri: str,
    index: int,
    checkpoint_uri: str,
    metrics: dsl.Output[dsl.Metrics],
    proof: dsl.Output[dsl.Markdown],
) -> str:
    """Reads back what a chunk committed, beside the next chunk and not in its way.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1.
        checkpoint_uri: What this stage waits for.
        metrics: Step, size and digest.
        proof: The chunk's part of the resume proof.

    Returns:
        Digest of the state; empty where the chunk left no checkpoint.
    """
    from baton.components.checkpoint.page import as_markdown
    from baton.components.checkpoint.promote import promote
    from baton.components.shared.core import events

    with events.stage(f"checkpoint {index}"):
        part = promote(run_uri, index)
        if part:
            metrics.log_metric("step", part.step)
            metrics.log_metric("bytes", part.bytes)
        with open(proof.path, "w", encoding="utf-8") as file:
            file.write(as_markdown(part))
    return part.digest if part else ""
