"""Train-chunk stage."""

from kfp import dsl

from baton.kfp.component import component


@component
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
    from baton import events

    with events.stage(f"train chunk {index}"):
        from baton.runs.ref import RunRef
        from baton.train import supervisor

        run_uri = RunRef.read(baton).run_uri
        outcome = supervisor.run(run_uri, index)
        from baton.pages import publish  # late: the process that forks has imported next to nothing
        from baton.train import page

        shown = page.Shown.of(run_uri, index, outcome)
        page.checkpoint_card(shown).write(checkpoint)
        with open(progress.path, "w", encoding="utf-8") as file:
            file.write(publish.progress_page(shown.run, shown.plan, shown.checkpoint, shown.log))
    return baton
