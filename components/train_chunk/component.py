"""Train-chunk stage."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def train_chunk(baton: str, index: int, checkpoint: dsl.Output[dsl.Model], progress: dsl.Output[dsl.HTML]) -> str:
    """Trains a run to the target of a chunk, from the newest valid checkpoint there is.

    Args:
        baton: The run.
        index: Number of the chunk, from 1.
        checkpoint: Step, losses, speed, digest and address of the newest checkpoint.
        progress: The loss so far.

    Returns:
        The baton.
    """
    from baton.components.shared.core import events

    with events.stage(f"train chunk {index}"):
        from baton.components.shared.runs.baton import Baton
        from baton.components.train_chunk import attempts

        run_uri = Baton.read(baton).run_uri
        outcome = attempts.run(run_uri, index)
        from baton.components.train_chunk import card  # what forks has imported next to nothing

        shown = card.Shown.of(run_uri, index, outcome)
        card.checkpoint_card(shown).leave(checkpoint)
        with open(progress.path, "w", encoding="utf-8") as file:
            file.write(card.progress_page(shown))
    return baton
