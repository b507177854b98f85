"""The line of train-chunks in a pipeline, and beside each the stage that reads back the previous checkpoint."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from kfp import dsl
from kfp.dsl.pipeline_channel import PipelineChannel

from baton.components.checkpoint.component import checkpoint
from baton.components.train_chunk.component import train_chunk
from baton.kfp import pod
from baton.recipe.recipe import Recipe

Value: TypeAlias = PipelineChannel | str  # address, name or baton: a parameter, an output or a constant
GROUP = 8  # chunks of a graph; more are spread over several


class Graph(NamedTuple):
    """A graph inside the pipeline's, which kfp wants made first."""

    name: str
    of: Callable[..., dsl.PipelineTask]


Placed = Callable[..., dsl.PipelineTask]  # names a task and sets its pod; `compute=True` where it runs the model


def placing(recipe: Recipe, prefix: str = "") -> Placed:
    """Returns the function that names the tasks of a recipe, after a prefix, and sets their pods."""

    def placed(task: dsl.PipelineTask, name: str, *, compute: bool = False) -> dsl.PipelineTask:
        task.set_display_name(prefix + name)
        pod.on_every_pod(task, recipe.resources, recipe.name, task.component_spec.name)
        pod.with_signatures(task, recipe)
        if compute:
            pod.on_compute_pod(task, recipe)
        return task

    return placed


def groups(recipe: Recipe) -> list[Graph]:
    """Returns the graphs of a training's chunks, none where there are few; see `line`."""
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
    """Returns number and name of each chunk in a range, spare ones included."""
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
    """Adds train-chunks in a line, beside each the check of the previous checkpoint; returns the last of both."""
    verified = None
    for index, name in slots:
        if before:
            verified = one_checkpoint(baton, before, verified, placed)
        chunk = placed(train_chunk(baton=baton, index=index), name, compute=True)
        pod.on_chunk(chunk, recipe)
        if index < cached_below:  # the last one always looks, and trains what others only seem to have left
            pod.with_cache(chunk)
        baton, before = chunk.outputs["Output"], index
    return baton, verified


def one_checkpoint(baton: Value, index: int, before: dsl.PipelineTask | None, placed: Placed) -> dsl.PipelineTask:
    """Adds the stage that reads back a chunk's checkpoint, after the same stage of the previous chunk."""
    task = placed(checkpoint(baton=baton, index=index), f"checkpoint {index}")
    return task.after(before) if before else task
