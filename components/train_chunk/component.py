"""Train-chunk stage."""

from baton.components.declaring import stage


@stage
def train_chunk(baton: str, index: int) -> str:
    """Trains a run to the target of a chunk, from the newest valid checkpoint there is.

    Args:
        baton: The run.
        index: Number of the chunk, from 1.

    Returns:
        The baton.
    """
    from baton.components.shared.core import events

    with events.stage(f"train chunk {index}"):
        from baton.components.shared.runs.baton import Baton
        from baton.components.train_chunk import attempts

        attempts.run(Baton.read(baton).run_uri, index)
    return baton
