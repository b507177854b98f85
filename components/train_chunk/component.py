"""Train-chunk stage."""

import json
import os

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
    _train(baton, index, checkpoint, progress)
    return baton


@component
def train_chunk_placed(
    baton: str,
    index: int,
    nodes: dict,
    checkpoint: dsl.Output[dsl.Model],
    progress: dsl.Output[dsl.HTML],
    next_nodes: dsl.OutputPath(dict),  # type: ignore[valid-type]
) -> str:
    """Trains a chunk as `train_chunk` does, and decides which nodes the next one runs on.

    Args:
        baton: The run.
        index: Number of the chunk, from 1.
        nodes: Labels of the nodes of this chunk.
        checkpoint: Step, losses, speed, digest and address of the newest checkpoint.
        progress: The loss so far.
        next_nodes: Labels of the nodes of the next chunk.

    Returns:
        The baton.
    """
    from baton.runs import capacity
    from baton.train.chunk import Ending

    os.environ[capacity.NODES] = json.dumps(nodes)
    shown = _train(baton, index, checkpoint, progress)
    outcome = shown.outcome
    is_lost = outcome.ending is Ending.PARTIAL or bool(outcome.notice)
    with open(next_nodes, "w", encoding="utf-8") as file:
        json.dump(capacity.next_nodes(shown.run, shown.plan, index, outcome.step, nodes, is_lost=is_lost), file)
    return baton


def _train(baton, index, checkpoint, progress):
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
        return shown
