"""The pipeline, as the list of its stages. Compiling it imports neither torch nor transformers."""

from collections.abc import Callable
from typing import TypeAlias

from kfp import dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_channel import PipelineChannel

from baton.components.checkpoint.component import checkpoint
from baton.components.data_split.component import data_split
from baton.components.evaluate.component import evaluate
from baton.components.export.component import export
from baton.components.gate.component import gate, reject
from baton.components.lr_find.component import lr_find
from baton.components.report.component import report
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.store import sources
from baton.components.tokenize.component import tokenize
from baton.components.train_chunk.component import train_chunk
from baton.pipelines import resources

Value: TypeAlias = PipelineChannel | str
"""An address or a name: the pipeline's parameter, what a stage puts out, or a constant."""


def finetune(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of a recipe, its chunks unrolled, its phases one after the other."""
    return _phased(recipe) if recipe.phases else _single(recipe)


def _single(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of one training. Its parameters are what one changes between runs."""
    training = recipe.training

    @dsl.pipeline(
        name=recipe.name,
        description=f"Trains {recipe.name} in {recipe.chunks.count} chunks, bit for bit.",
        pipeline_config=resources.of_run(recipe.resources),
    )
    def pipeline(
        run_name: str = "",
        store: str = recipe.store.uri,
        source: str = source_parameter(recipe),
        learning_rate: float = training.learning_rate,
        epochs: float = epochs_parameter(recipe),
        max_steps: int = training.max_steps or 0,
    ) -> str:
        """Trains a model in chunks.

        Args:
            run_name: Name of the training run; the same name resumes where it stopped. Empty: a new run.
            store: Folder, s3://, gs:// or az:// bucket, for runs and data.
            source: Rows to learn from: file, folder, glob, s3://, gs://, az:// or hf://; several joined by a comma.
            learning_rate: Peak learning rate.
            epochs: Passes over the training rows; 0 where max_steps counts.
            max_steps: Optimizer steps; 0 where epochs counts.
        """
        split = split_task(
            recipe,
            store,
            run_name=run_name,
            new_name=recipe.name,
            job_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            source=source,
            learning_rate=learning_rate,
            epochs=epochs,
            max_steps=max_steps,
        )
        return stages(recipe, split)

    return pipeline


def _phased(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of several trainings, each its own run that starts from the model of the one before."""
    names = ", ".join(phase.name for phase in recipe.phases)

    @dsl.pipeline(
        name=recipe.name,
        description=f"Trains {recipe.name} in phases, each in chunks: {names}.",
        pipeline_config=resources.of_run(recipe.resources),
    )
    def pipeline(run_name: str = "", store: str = recipe.store.uri) -> str:
        """Trains a model in phases.

        Args:
            run_name: Name of the training run; the same name resumes where it stopped. Empty: a new run.
            store: Folder, s3://, gs:// or az:// bucket, for runs and data.
        """
        return phases(recipe, run_name, store)

    return pipeline


def phases(recipe: Recipe, run_name: Value, store: Value) -> Value:
    """Adds the stages of all phases and returns the address of the last one's model."""
    model: Value = ""
    for phase, part in zip(recipe.phases, recipe.phase_recipes(), strict=True):
        split = split_task(
            part,
            store,
            run_name=run_name,
            new_name=recipe.name,
            job_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            phase=phase.name,
            start_from=model,
        )
        model = stages(part, split, f"{phase.name}: ")
    return model


def split_task(
    recipe: Recipe,
    store: Value,
    *,
    run_name: Value,
    document: Value | None = None,
    new_name: str = "",
    job_id: str = "",
    source: Value | None = None,
    learning_rate: PipelineChannel | float | None = None,
    epochs: PipelineChannel | float | None = None,
    max_steps: PipelineChannel | int | None = None,
    phase: str = "",
    start_from: Value = "",
) -> dsl.PipelineTask:
    """Adds the data split of a training.

    Args:
        recipe: The recipe, whose values stand where the others are None.
        store: See `baton.components.data_split.component` for this and the rest.
        run_name: Name of the run.
        document: The recipe as JSON.
        new_name: What the name of a new run begins with.
        job_id: What it ends in.
        source: Rows to learn from.
        learning_rate: Peak learning rate.
        epochs: Passes over the rows.
        max_steps: Optimizer steps.
        phase: Name of one training of several.
        start_from: Address of the model of the phase before.
    """
    training = recipe.training
    return data_split(
        recipe=recipe_file.dumps(recipe) if document is None else document,
        run_name=run_name,
        new_name=new_name,
        job_id=job_id,
        store=store,
        source=source_parameter(recipe) if source is None else source,
        learning_rate=training.learning_rate if learning_rate is None else learning_rate,
        epochs=epochs_parameter(recipe) if epochs is None else epochs,
        max_steps=(training.max_steps or 0) if max_steps is None else max_steps,
        phase=phase,
        start_from=start_from,
    )


Placed = Callable[..., dsl.PipelineTask]
"""Names a task and says what its pod asks for; `compute=True` for one that runs the model."""


def placing(recipe: Recipe, prefix: str = "") -> Placed:
    """Returns what places the tasks of a recipe, their names after a prefix."""

    def placed(task: dsl.PipelineTask, name: str, *, compute: bool = False) -> dsl.PipelineTask:
        task.set_display_name(prefix + name)
        resources.on_every_pod(task, recipe.resources, recipe.name, task.component_spec.name)
        if compute:
            resources.on_compute_pod(task, recipe)
        return task

    return placed


def stages(recipe: Recipe, split: dsl.PipelineTask, prefix: str = "") -> Value:
    """Adds the stages of one training and returns the address of its model."""
    placed = placing(recipe, prefix)
    run_uri, cache_key = placed(split, "data split").outputs["Output"], split.outputs["cache_key"]
    tokens = placed(tokenize(run_uri=run_uri, cache_key=cache_key), "tokenize")
    # Safe, as the key holds what the split has seen of the run: it is another one where a run was deleted or what a
    # stage had left is gone (see DECISIONS.md).
    resources.with_cache(tokens)
    previous = tokens.outputs["Output"]
    if recipe.training.lr_find:
        trial = lr_find(run_uri=run_uri, previous=previous, cache_key=cache_key)
        found = placed(trial, "learning-rate finder", compute=True)
        resources.with_cache(found)
        previous = found.outputs["Output"]
    verified = []
    slots = recipe.chunks.slots
    for index in range(1, slots + 1):
        name = f"train chunk {index}" if index <= recipe.chunks.count else f"spare chunk {index}"
        chunk, kept = one_chunk(recipe, run_uri, index, previous, cache_key, name, placed)
        if index < slots:  # the last one always looks, and trains whatever the others only seem to have left
            resources.with_cache(chunk)
        previous = chunk.outputs["Output"]
        verified.append(kept)
    return judged(recipe, run_uri, previous, verified, placed)


def one_chunk(
    recipe: Recipe, run_uri: Value, index: int, previous: Value, cache_key: Value, name: str, placed: Placed
) -> tuple[dsl.PipelineTask, dsl.PipelineTask]:
    """Adds a train-chunk and the stage beside the next one that reads back what it committed, and returns both."""
    part = train_chunk(run_uri=run_uri, index=index, previous=previous, cache_key=cache_key)
    chunk = placed(part, name, compute=True)
    resources.on_chunk(chunk, recipe)
    kept = checkpoint(run_uri=run_uri, index=index, checkpoint_uri=chunk.outputs["Output"])
    return chunk, placed(kept, f"checkpoint {index}")


def judged(recipe: Recipe, run_uri: Value, trained: Value, verified: list[dsl.PipelineTask], placed: Placed) -> Value:
    """Adds what comes after the last chunk, and returns the address of the model or why there is none.

    Args:
        recipe: The recipe.
        run_uri: Address of the run.
        trained: What the evaluation waits for.
        verified: What the report waits for.
        placed: See `placing`.
    """
    evaluation = placed(evaluate(run_uri=run_uri, checkpoint_uri=trained), "evaluate", compute=True)
    outcome = _handed_out(recipe, run_uri, evaluation.outputs["Output"], placed)
    placed(report(run_uri=run_uri, outcome=outcome), "report").after(*verified)
    return outcome


def _handed_out(recipe: Recipe, run_uri: Value, evaluation: Value, placed: Placed) -> Value:
    """Adds the export, after the gate where there is one, and returns the model's address or why there is none."""

    def exported() -> dsl.PipelineTask:
        task = placed(export(run_uri=run_uri, evaluation=evaluation), "export")
        resources.with_memory(task, recipe.resources)
        return task

    if not recipe.evaluation.gate:
        return exported().outputs["Output"]
    verdict = placed(gate(run_uri=run_uri, evaluation=evaluation), "gate").outputs["Output"]
    with dsl.If(verdict == "accepted", "accepted"):
        accepted = exported()
    with dsl.Else("rejected"):
        rejected = placed(reject(run_uri=run_uri), "rejected")
    return dsl.OneOf(accepted.outputs["Output"], rejected.outputs["Output"])


def source_parameter(recipe: Recipe) -> str:
    """Returns the sources as one parameter."""
    return sources.as_parameter(recipe.data.model_dump(mode="json")["source"])


def epochs_parameter(recipe: Recipe) -> float:
    """Returns the passes over the rows, 0 where steps count."""
    return 0.0 if recipe.training.max_steps else recipe.training.epochs or 1.0
