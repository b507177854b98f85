"""Checkpoint stage."""

from kfp import dsl

from baton.kfp.component import component


@component
def checkpoint(baton: str, index: int, proof: dsl.Output[dsl.Markdown]):
    """Reads back a chunk's checkpoint while the next chunk trains.

    Args:
        baton: The run.
        index: Number of the chunk, from 1.
        proof: The chunk's part of the resume proof.
    """
    from baton import events
    from baton.checkpoint.proof import read_back
    from baton.runs.ref import RunRef

    with events.stage(f"checkpoint {index}"), open(proof.path, "w", encoding="utf-8") as file:
        run_uri = RunRef.read(baton).run_uri
        file.write(read_back(run_uri, index))
        from baton.pages import publish  # late: the proof does not wait for the page's imports

        publish.write_progress(run_uri)
