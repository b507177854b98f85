"""The line of train-chunks in a pipeline, and beside each the stage that reads back what the one before committed."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from kfp import dsl
from kfp.dsl.pipeline_channel import PipelineChannel

from baton.components.checkpoint.component import checkpoint
from baton.components.train_chunk.component import train_chunk
from baton.kfp import pod
from baton.recipe.recipe import Recipe

Value: TypeAlias = PipelineChannel | str
"""An address, a name or a baton: the pipeline's parameter, what a stage puts out, or a constant."""
GROUP = 8
"""Chunks of a graph; where there are more, each so many lie in a graph of their own."""


class Graph(NamedTuple):
    """A graph inside the pipeline's, which kfp wants to be made before that."""

    name: str
    of: Callable[..., dsl.PipelineTask]


Placed = Callable[..., dsl.PipelineTask]
"""Names a task and says what its pod asks for; `compute=True` for one that runs the model."""


def placing(recipe: Recipe, prefix: str = "") -> Placed:
    """Returns what places the tasks of a recipe, their names after a prefix."""

    def placed(task: dsl.PipelineTask, name: str, *, compute: bool = False) -> dsl.PipelineTask:
        task.set_display_name(prefix + name)
        pod.on_every_pod(task, recipe.resources, recipe.name, task.component_spec.name)
        pod.with_signatures(task, recipe)
        if compute:
            pod.on_compute_pod(task, recipe)
        return task

    return placed


def groups(recipe: Recipe) -> list[Graph]:
    """Returns the graphs that the chunks of a training lie in, none where there are few; see `line`."""
    last = recipe.slots

    def group(first: int, end: int) -> Graph:
        @dsl.pipeline(name=f"chunks-{first}")
        def chunks(baton: str) -> str:
            slots = slots_of(recipe, first, end)
            return line(recipe, baton, slots, placing(recipe), cached_below=last, before=first - 1)[0]

        return Graph(f"chunks {first}–{end}", chunks)

    firsts = range(1, last + 1, GROUP) if last > GROUP else ()
    return [group(first, min(first + GROUP - 1, last)) for first in firsts]


def slots_of(recipe: Recipe, first: int, end: int) -> list[tuple[int, str]]:
    """Returns number and name of each chunk of a range, spare ones included."""
    return [
        (index, f"train chunk {index}" if index <= recipe.num_chunks else f"spare chunk {index}")
        for index in range(first, end + 1)
    ]


def line(
    recipe: Recipe,
    baton: Value,
    slots: Iterable[tuple[int, str]],
    placed: Placed,
    *,
    cached_below: int = 0,
    before: int = 0,
) -> tuple[Value, dsl.PipelineTask | None]:
    """Adds train-chunks one after the other, and beside each the stage that reads back what the one before committed.

    Args:
        recipe: The recipe.
        baton: What the first chunk is given.
        slots: Number and name of each chunk.
        placed: See `placing`.
        cached_below: The chunk from which on Kubeflow's cache is not asked: the last one always looks, and trains
            whatever the others only seem to have left.
        before: Number of the chunk before the first, 0 where there is none.

    Returns:
        The baton from the last chunk, and the last stage that reads back, if there is one.
    """
    verified = None
    for index, name in slots:
        if before:
            verified = one_checkpoint(baton, before, verified, placed)
        chunk = placed(train_chunk(baton=baton, index=index), name, compute=True)
        pod.on_chunk(chunk, recipe)
        if index < cached_below:
            pod.with_cache(chunk)
        baton, before = chunk.outputs["Output"], index
    return baton, verified


def one_checkpoint(baton: Value, index: int, before: dsl.PipelineTask | None, placed: Placed) -> dsl.PipelineTask:
    """Adds the stage that reads back what a chunk committed, after the one that did so for the chunk before."""
    task = placed(checkpoint(baton=baton, index=index), f"checkpoint {index}")
    return task.after(before) if before else task
