"""The pipeline, as the list of its stages. Compiling it imports neither torch nor transformers."""

from collections.abc import Callable
from typing import Any

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from components.checkpoint.component import checkpoint
from components.data_split.component import data_split
from components.evaluate.component import evaluate
from components.export.component import export
from components.gate.component import gate, reject
from components.lr_find.component import lr_find
from components.report.component import report
from components.shared import recipe_file
from components.shared.recipe import Recipe
from components.shared.store import sources
from components.tokenize.component import tokenize
from components.train_chunk.component import train_chunk
from pipelines import resources


def finetune(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of a recipe, its chunks unrolled, its phases one behind the other."""
    return _phased(recipe) if recipe.phases else _single(recipe)


def _single(recipe: Recipe) -> BaseComponent:
    """Its parameters are what one changes between runs; their defaults are the recipe's values."""
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
            run_name: Name of the training run; the same name goes on where it stopped. Empty: a new run.
            store: Folder or s3://bucket for runs and data.
            source: Rows to learn from: file, folder, glob, s3:// or hf://; several joined by a comma.
            learning_rate: Peak learning rate.
            epochs: Passes over the training rows; 0 where max_steps counts.
            max_steps: Optimizer steps; 0 where epochs counts.
        """
        split = data_split(
            recipe=recipe_file.dumps(recipe),
            run_name=run_name,
            new_name=recipe.name,
            job_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            store=store,
            source=source,
            learning_rate=learning_rate,
            epochs=epochs,
            max_steps=max_steps,
            phase="",
            start_from="",
        )
        return stages(recipe, split)  # type: ignore[no-any-return]

    return pipeline


def _phased(recipe: Recipe) -> BaseComponent:
    """Each phase is a run of its own, which starts from the model that the one before exports."""
    names = ", ".join(phase.name for phase in recipe.phases)

    @dsl.pipeline(
        name=recipe.name,
        description=f"Trains {recipe.name} in phases, each in chunks: {names}.",
        pipeline_config=resources.of_run(recipe.resources),
    )
    def pipeline(run_name: str = "", store: str = recipe.store.uri) -> str:
        """Trains a model in phases.

        Args:
            run_name: Name of the training run; the same name goes on where it stopped. Empty: a new run.
            store: Folder or s3://bucket for runs and data.
        """
        return phases(recipe, run_name, store)  # type: ignore[no-any-return]

    return pipeline


def phases(recipe: Recipe, run_name: Any, store: Any) -> Any:
    """Adds the stages of all phases and returns the address of the last one's model."""
    model: Any = ""
    for phase, part in zip(recipe.phases, recipe.phase_recipes(), strict=True):
        split = data_split(
            recipe=recipe_file.dumps(part),
            run_name=run_name,
            new_name=recipe.name,
            job_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            store=store,
            source=source_parameter(part),
            learning_rate=part.training.learning_rate,
            epochs=epochs_parameter(part),
            max_steps=part.training.max_steps or 0,
            phase=phase.name,
            start_from=model,
        )
        model = stages(part, split, f"{phase.name}: ")
    return model


Placed = Callable[..., dsl.PipelineTask]
"""Names a task and says what its pod asks for; `compute=True` for one that runs the model."""


def placing(recipe: Recipe, prefix: str = "") -> Placed:
    """Returns what places the tasks of a recipe, their names behind a prefix."""

    def placed(task: dsl.PipelineTask, name: str, *, compute: bool = False) -> dsl.PipelineTask:
        task.set_display_name(prefix + name)
        resources.on_every_pod(task, recipe.resources, recipe.name, task.component_spec.name)
        if compute:
            resources.on_compute_pod(task, recipe)
        return task

    return placed


def stages(recipe: Recipe, split: dsl.PipelineTask, prefix: str = "") -> Any:
    """Adds the stages of one training and returns the address of its model."""
    placed = placing(recipe, prefix)
    run_uri, standing = placed(split, "data split").outputs["Output"], split.outputs["standing"]
    tokens = placed(tokenize(run_uri=run_uri, standing=standing), "tokenize")
    resources.with_cache(tokens)
    previous = tokens.outputs["Output"]
    if recipe.training.lr_find:
        trial = lr_find(run_uri=run_uri, previous=previous, standing=standing)
        found = placed(trial, "learning-rate finder", compute=True)
        resources.with_cache(found)
        previous = found.outputs["Output"]
    verified = []
    slots = recipe.chunks.count + recipe.chunks.spare
    for index in range(1, slots + 1):
        name = f"train chunk {index}" if index <= recipe.chunks.count else f"spare chunk {index}"
        chunk, kept = one_chunk(recipe, run_uri, index, previous, standing, name, placed)
        if index < slots:  # the last one always looks, and trains whatever the others only seem to have left
            resources.with_cache(chunk)
        previous = chunk.outputs["Output"]
        verified.append(kept)
    return judged(recipe, run_uri, previous, verified, placed)


def one_chunk(
    recipe: Recipe, run_uri: Any, index: int, previous: Any, standing: Any, name: str, placed: Placed
) -> tuple[dsl.PipelineTask, dsl.PipelineTask]:
    """Adds a train-chunk and the stage beside the next one that reads back what it committed, and returns both."""
    part = train_chunk(run_uri=run_uri, index=index, previous=previous, standing=standing)
    chunk = placed(part, name, compute=True)
    resources.on_chunk(chunk, recipe)
    kept = checkpoint(run_uri=run_uri, index=index, checkpoint_uri=chunk.outputs["Output"])
    return chunk, placed(kept, f"checkpoint {index}")


def judged(recipe: Recipe, run_uri: Any, trained: Any, verified: list[dsl.PipelineTask], placed: Placed) -> Any:
    """Adds what comes behind the last chunk, and returns the address of the model or why there is none.

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


def _handed_out(recipe: Recipe, run_uri: Any, evaluation: Any, placed: Placed) -> Any:
    """Adds the export, behind the gate where there is one, and returns the model's address or why there is none."""

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
