"""The pipeline, as the list of its stages. Compiling it imports neither torch nor transformers."""

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from components.checkpoint.component import checkpoint
from components.data_split.component import data_split
from components.evaluate.component import evaluate
from components.export.component import export
from components.report.component import report
from components.shared import recipe_file
from components.shared.recipe import Recipe
from components.tokenize.component import tokenize
from components.train_chunk.component import train_chunk
from pipelines import resources


def finetune(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of a recipe, its chunks unrolled.

    Its parameters are what one changes between runs; their defaults are the recipe's values.
    """
    pods, training = recipe.resources, recipe.training
    recipe_json = recipe_file.dumps(recipe)

    def placed(task: dsl.PipelineTask, name: str, *, compute: bool = False) -> dsl.PipelineTask:
        task.set_display_name(name)
        resources.on_every_pod(task, pods, recipe.name)
        if compute:
            resources.on_compute_pod(task, recipe)
        return task

    @dsl.pipeline(name=recipe.name, description=f"Trains {recipe.name} in {recipe.chunks.count} chunks, bit for bit.")
    def pipeline(
        run_name: str = "",
        store: str = recipe.store.uri,
        source: str = ",".join(recipe.data.source),
        learning_rate: float = training.learning_rate,
        epochs: float = 0.0 if training.max_steps else training.epochs or 1.0,
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
            recipe=recipe_json,
            run_name=run_name,
            new_name=f"{recipe.name}-{dsl.PIPELINE_JOB_ID_PLACEHOLDER}",
            store=store,
            source=source,
            learning_rate=learning_rate,
            epochs=epochs,
            max_steps=max_steps,
        )
        run_uri = placed(split, "data split").outputs["Output"]
        tokens = placed(tokenize(run_uri=run_uri), "tokenize")
        previous = tokens.outputs["Output"]
        verified = []
        for index in range(1, recipe.chunks.count + recipe.chunks.spare + 1):
            name = f"train chunk {index}" if index <= recipe.chunks.count else f"spare chunk {index}"
            chunk = placed(train_chunk(run_uri=run_uri, index=index, previous=previous), name, compute=True)
            resources.on_chunk(chunk, recipe)
            previous = chunk.outputs["Output"]
            kept = checkpoint(run_uri=run_uri, index=index, checkpoint_uri=previous)
            verified.append(placed(kept, f"checkpoint {index}"))
        judged = placed(evaluate(run_uri=run_uri, checkpoint_uri=previous), "evaluate", compute=True)
        exported = placed(export(run_uri=run_uri, loss=judged.outputs["Output"]), "export")
        placed(report(run_uri=run_uri, model_uri=exported.outputs["Output"]), "report").after(*verified)
        return exported.outputs["Output"]  # type: ignore[no-any-return]

    return pipeline
