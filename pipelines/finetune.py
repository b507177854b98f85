"""The pipeline that fine-tunes a model, by stages and chunks; compiling imports neither torch nor transformers."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kfp import dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.graph_component import GraphComponent
from kfp.dsl.pipeline_channel import PipelineChannel

from baton.components.checkpoint.component import checkpoint
from baton.components.data_split.component import data_split
from baton.components.evaluate.component import evaluate
from baton.components.export.component import export
from baton.components.gate.component import gate, reject
from baton.components.lr_find.component import lr_find
from baton.components.report.component import report
from baton.components.tokenize.component import tokenize, tokenize_shard
from baton.components.train_chunk.component import train_chunk, train_chunk_placed
from baton.kfp import pod
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import ref
from baton.runs.capacity import SPOT
from baton.store import sources

Value: TypeAlias = PipelineChannel | str  # address, name or baton: a parameter, an output or a constant
Nodes: TypeAlias = PipelineChannel | dict[str, object] | None  # labels of a chunk's nodes, with `capacity: spot-first`
GROUP = 8  # chunks of a graph; more are spread over several


class Graph(NamedTuple):
    """A graph inside the pipeline's, which kfp wants made first."""

    name: str
    of: Callable[..., dsl.PipelineTask]


class GroupOutputs(NamedTuple):
    """Values from graph to graph of chunks with `capacity: spot-first`."""

    Output: str
    nodes: dict[str, object]  # kfp reads the types


class Line(NamedTuple):
    """Values of the last of several chunks, and the last check of a checkpoint."""

    baton: Value
    verified: dsl.PipelineTask | None
    nodes: Nodes


Placed = Callable[..., dsl.PipelineTask]  # names a task and sets its pod; `compute=True` where it runs the model


def placing(recipe: Recipe, prefix: str = "") -> Placed:
    """Returns the function that names the tasks of a recipe, after a prefix, and sets their pods."""

    def placed(task: dsl.PipelineTask, name: str, *, compute: bool = False) -> dsl.PipelineTask:
        task.set_display_name(prefix + name)
        stage = "train-chunk" if task.component_spec.name == "train-chunk-placed" else task.component_spec.name
        pod.on_every_pod(task, recipe.resources, recipe.name, stage)
        pod.with_signatures(task, recipe)
        if compute:
            pod.on_compute_pod(task, recipe)
        return task

    return placed


def groups(recipe: Recipe) -> list[Graph]:
    """Returns the graphs of a training's chunks, none where there are few; see `line`."""
    last = recipe.slots

    def group(first: int, end: int) -> Graph:
        def added(baton: str, nodes: Nodes = None) -> Line:
            slots = slots_of(recipe, first, end)
            return line(recipe, baton, slots, placing(recipe), cached_below=last, before=first - 1, nodes=nodes)

        def chunks(baton: str) -> str:
            return added(baton).baton

        def placed_chunks(baton: str, nodes: dict[str, object]) -> GroupOutputs:
            ended = added(baton, nodes)
            return GroupOutputs(ended.baton, ended.nodes)  # type: ignore[arg-type]

        graph = dsl.pipeline(placed_chunks if recipe.resources.is_placed else chunks, name=f"chunks-{first}")
        if recipe.resources.is_placed:  # a selector names the previous chunk
            _own_executors(graph, str(first))
        return Graph(f"chunks {first}–{end}", graph)

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
    nodes: Nodes = None,
) -> Line:
    """Adds train-chunks in a line, each parallel to the check of the previous checkpoint; returns the last of both."""
    verified = None
    for index, name in slots:
        if before:
            verified = one_checkpoint(baton, before, verified, placed)
        if nodes is None:
            task = train_chunk(baton=baton, index=index)
        else:
            task = train_chunk_placed(baton=baton, index=index, nodes=nodes)
        chunk = placed(task, name, compute=True)
        pod.on_chunk(chunk, recipe, nodes)
        # The last one always looks, and trains what others only seem to have left. A choice of nodes holds once.
        if index < cached_below and nodes is None:
            pod.with_cache(chunk)
        baton, before = chunk.outputs["Output"], index
        nodes = nodes and chunk.outputs["next_nodes"]
    return Line(baton, verified, nodes)


def one_checkpoint(baton: Value, index: int, before: dsl.PipelineTask | None, placed: Placed) -> dsl.PipelineTask:
    """Adds the stage that reads back a chunk's checkpoint, after the same stage of the previous chunk."""
    task = placed(checkpoint(baton=baton, index=index), f"checkpoint {index}")
    return task.after(before) if before else task


def shards(recipe: Recipe) -> list[Graph]:
    """Returns the graph of tokenizing, none where one pod does it."""
    of = recipe.data.shards
    if of == 1:
        return []
    spec = recipe.model.tokenizer
    placed = placing(recipe)

    # A graph of its own: after a loop in the root the last pod would wait for the data split too, off the batons' line.
    @dsl.pipeline(name="tokenize-shards")
    def tokenize_shards(baton: str) -> str:
        trained = None
        if spec and spec.train:  # from all rows, so by one process, for all shards
            trained = placed(tokenize_shard(baton=baton, index=0, of=of), "train tokenizer")
            pod.with_cache(trained)
        with dsl.ParallelFor(list(range(1, of + 1)), name="shards") as index:
            shard = placed(tokenize_shard(baton=baton, index=index, of=of), "tokenize shard")
            pod.with_cache(shard)
            if trained:
                shard.after(trained)
        joined = placed(tokenize(baton=baton).after(shard), "tokenize")
        pod.with_cache(joined)
        output: Value = joined.outputs["Output"]
        return output

    return [Graph(f"tokenize in {of} shards", tokenize_shards)]


Given: TypeAlias = Value | float | dict[str, object]  # of a pipeline's parameter, for the first stage


@dataclass(frozen=True)
class Trained:
    """Outcome of a training."""

    baton: Value
    model: Value  # address of the model, or why there is none


class PhaseOutputs(NamedTuple):
    """Values from phase to phase, as `Trained`."""

    baton: str
    model: str


def finetune(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of a recipe, its chunks unrolled, its phases one after the other."""
    return _phased(recipe) if recipe.phases else _single(recipe)


def _single(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of one training; its parameters are those that change between runs."""
    training, graphs = recipe.training, inner_graphs(recipe)

    def pipeline(
        run_name: str = "",
        store: str = ref.encode_text(recipe.store.uri),
        source: str = ref.encode_text(source_parameter(recipe)),
        learning_rate: float = training.learning_rate,
        epochs: float = epochs_parameter(recipe),
        max_steps: int = training.max_steps or 0,
        base_model: str = ref.encode_text(recipe.model.base or ""),
        seed: int = recipe.seed,
        batch_size: int = training.batch_size,
        overrides: dict[str, object] = {},  # noqa: B006 - kfp reads it
        nodes: dict[str, object] = first_nodes(recipe),  # noqa: B008 - kfp reads it
    ) -> str:
        """Trains a model in chunks.

        Args:
            run_name: Name of the training run; the same name resumes where it stopped. Empty: a new run.
            store: Folder, s3://, gs:// or az:// bucket, for runs and data.
            source: Rows to learn from: file, folder, glob, s3://, gs://, az:// or hf://; several joined by a comma.
            learning_rate: Peak learning rate.
            epochs: Passes over the training rows; 0 where max_steps counts.
            max_steps: Optimizer steps; 0 where epochs counts.
            base_model: Model that training starts from: hub id, folder or URI. Empty: one from scratch.
            seed: Decides the split, initial weights, the order of rows and every random draw.
            batch_size: Rows per optimizer step.
            overrides: Other settings of the recipe by their paths, such as {"training.weight_decay": 0.1}.
            nodes: Labels of the nodes of the first chunk.
        """
        start = {"source": source, "base_model": base_model, "epochs": epochs, "max_steps": max_steps}
        rest = {"learning_rate": learning_rate, "batch_size": batch_size, "seed": seed, "overrides": overrides}
        split = split_task(
            recipe,
            store,
            run_name=run_name,
            new_name=recipe.name,
            job_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            **start,
            **rest,
        )
        return stages(recipe, split, graphs, nodes if recipe.resources.is_placed else None).model

    if not recipe.resources.is_placed:
        signature = inspect.signature(pipeline)
        kept = [parameter for name, parameter in signature.parameters.items() if name != "nodes"]
        pipeline.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return dsl.pipeline(
        pipeline,
        name=recipe.name,
        description=f"Trains {recipe.name} in {recipe.num_chunks} chunks, bit for bit.",
        pipeline_config=pod.run_config(recipe.resources),
    )


def _phased(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of several trainings, each its own run that starts from the previous one's model."""
    names, graphs = ", ".join(phase.name for phase in recipe.phases), phase_graphs(recipe)

    @dsl.pipeline(
        name=recipe.name,
        description=f"Trains {recipe.name} in phases, each in chunks: {names}.",
        pipeline_config=pod.run_config(recipe.resources),
    )
    def pipeline(
        run_name: str = "",
        store: str = ref.encode_text(recipe.store.uri),
        base_model: str = ref.encode_text(recipe.model.base or ""),
        seed: int = recipe.seed,
        overrides: dict[str, object] = {},  # noqa: B006 - kfp reads it
    ) -> str:
        """Trains a model in phases.

        Args:
            run_name: Name of the training run; the same name resumes where it stopped. Empty: a new run.
            store: Folder, s3://, gs:// or az:// bucket, for runs and data.
            base_model: Model that the first phase starts from: hub id, folder or URI. Empty: one from scratch.
            seed: Decides the splits, initial weights, the order of rows and every random draw.
            overrides: Other settings of the recipe by their paths, such as {"training.weight_decay": 0.1}; those of a
                phase after its name, {"sft.training.learning_rate": 0.0001}.
        """
        given = {"base_model": base_model, "seed": seed, "overrides": overrides}
        return phases(recipe, graphs, run_name, store, given).model

    return pipeline


def phases(
    recipe: Recipe, graphs: Sequence[Graph], run_name: Value, store: Value, given: Mapping[str, Given]
) -> Trained:
    """Adds all phases, each the graph that `phase_graphs` made of it, and returns the outcome of the last."""
    trained = Trained("", "")
    for part, graph in zip(recipe.phase_recipes(), graphs, strict=True):
        # All phases get base model, seed and overrides, so that the first finds mistakes in the last one's.
        task = graph.of(run_name=run_name, store=store, start_from=trained.model, **given)
        task.set_display_name(graph.name)
        trained = Trained(task.outputs["baton"], task.outputs["model"])
        # Parallel to the next phase: a graph ends only when all in it has ended.
        placing(part, f"{graph.name}: ")(report(baton=trained.baton), "report")
    return trained


def phase_graphs(recipe: Recipe) -> list[Graph]:
    """Returns the graph of each training of several."""

    def graph(name: str, part: Recipe) -> Graph:
        inner = inner_graphs(part)

        @dsl.pipeline(name=name)
        def phase(
            run_name: str, store: str, base_model: str, seed: int, overrides: dict[str, object], start_from: str
        ) -> PhaseOutputs:
            split = split_task(
                recipe,
                store,
                run_name=run_name,
                new_name=recipe.name,
                job_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
                base_model=base_model,
                seed=seed,
                overrides=overrides,
                phase=name,
                start_from=start_from,
            )
            trained, _ = _trained(part, split, inner, placing(part))
            return PhaseOutputs(baton=trained.baton, model=trained.model)

        _own_executors(phase, name)
        return Graph(name, phase)

    return [graph(phase.name, part) for phase, part in zip(recipe.phases, recipe.phase_recipes(), strict=True)]


def _own_executors(graph: GraphComponent, name: str) -> None:
    """Names a graph's executors after it."""
    # kfp 2.17 renames executors of a second graph that have the names of the first's. Before that it gives the second's
    # Kubernetes settings to some of the first's, by chance.
    spec, platforms = graph.component_spec.implementation.graph, graph.component_spec.platform_spec.platforms
    settings = [platforms[platform].deployment_spec.executors for platform in sorted(platforms)]
    for executors in (spec.deployment_spec["executors"].fields, *settings):
        for label in sorted(executors):
            executors[f"{label}-{name}"].CopyFrom(executors[label])
            del executors[label]
    for component in spec.components.values():
        if component.executor_label:
            component.executor_label += f"-{name}"


def split_task(
    recipe: Recipe,
    store: Value,
    *,
    run_name: Value,
    document: Value | None = None,
    **given: Given,
) -> dsl.PipelineTask:
    """Adds the data split; `document` is the packed recipe where it is known only when the pipeline runs."""
    document = ref.pack_text(load.dumps(recipe)) if document is None else document
    named = {"new_name": "", "job_id": ""}
    return data_split(recipe=document, run_name=run_name, store=store, **{**named, **given})


def inner_graphs(recipe: Recipe) -> list[Graph]:
    """Returns the graphs inside a training's, in the order of its line: of `shards`, then of `groups`."""
    return [*shards(recipe), *groups(recipe)]


def stages(recipe: Recipe, split: dsl.PipelineTask, graphs: Sequence[Graph], nodes: Nodes = None) -> Trained:
    """Adds the stages of one training, with its `inner_graphs`; `nodes` are the first chunk's."""
    placed = placing(recipe)
    if recipe.resources.is_placed and nodes is None:
        nodes = first_nodes(recipe)
    trained, verified = _trained(recipe, split, graphs, placed, nodes)
    placed(report(baton=trained.baton), "report").after(verified)
    return trained


def first_nodes(recipe: Recipe) -> dict[str, object]:
    """Returns the labels of the first chunk's nodes with `capacity: spot-first`."""
    return dict(recipe.resources.nodes_of(SPOT))


def _trained(
    recipe: Recipe, split: dsl.PipelineTask, graphs: Sequence[Graph], placed: Placed, nodes: Nodes = None
) -> tuple[Trained, dsl.PipelineTask]:
    """Adds all stages but the report; returns their outcome, and the stage that reads back the last checkpoint."""
    # Each stage waits for the previous one by the baton that it passes on unchanged. The cache is safe, as the baton
    # holds all that the split saw of the run: it changes where a run was deleted, or the output of a stage is gone.
    baton = placed(split, "data split").outputs["Output"]
    if recipe.data.shards > 1:
        sharded, *graphs = graphs
        tokens = sharded.of(baton=baton).set_display_name(sharded.name)
    else:
        tokens = placed(tokenize(baton=baton), "tokenize")
        pod.with_cache(tokens)
    baton = tokens.outputs["Output"]
    if recipe.training.lr_find:
        trial = placed(lr_find(baton=baton), "learning-rate finder", compute=True)
        pod.with_cache(trial)
        baton = trial.outputs["Output"]
    last = recipe.slots
    verified = None
    if not graphs:
        baton, verified, _ = line(recipe, baton, slots_of(recipe, 1, last), placed, cached_below=last, nodes=nodes)
    for graph in graphs:
        inputs = {"baton": baton} if nodes is None else {"baton": baton, "nodes": nodes}
        ended = graph.of(**inputs).set_display_name(graph.name).outputs
        baton, nodes = ended["Output"], nodes and ended["nodes"]
    # Parallel to the evaluation. A graph ends with its last task, so the last chunk's is never in the chunks' own.
    verified = one_checkpoint(baton, last, verified, placed)
    return judged(recipe, baton, placed), verified


def judged(recipe: Recipe, baton: Value, placed: Placed) -> Trained:
    """Adds the stages between the last chunk and the report."""
    evaluation = placed(evaluate(baton=baton), "evaluate", compute=True).outputs["Output"]

    def exported(baton: Value) -> dsl.PipelineTask:
        task = placed(export(baton=baton), "export")
        pod.with_memory(task, recipe.resources)
        return task

    if not recipe.evaluation.gate:
        task = exported(evaluation)
        return Trained(task.outputs["Output"], task.outputs["address"])
    verdict = placed(gate(baton=evaluation), "gate").outputs
    with dsl.If(verdict["verdict"] == "accepted", "accepted"):
        accepted = exported(verdict["Output"]).outputs
    with dsl.Else("rejected"):
        rejected = placed(reject(baton=verdict["Output"]), "rejected").outputs
    return Trained(
        dsl.OneOf(accepted["Output"], rejected["Output"]), dsl.OneOf(accepted["address"], rejected["reason"])
    )


def source_parameter(recipe: Recipe) -> str:
    """Returns the sources as one parameter."""
    return sources.as_parameter(recipe.data.model_dump(mode="json")["source"])


def epochs_parameter(recipe: Recipe) -> float:
    """Returns the passes over the rows, 0 where steps count."""
    return 0.0 if recipe.training.max_steps else recipe.training.epochs or 1.0
