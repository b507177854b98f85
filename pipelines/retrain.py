"""The pipeline that trains a model again when its data or its recipe have changed, and not otherwise.

look → (fine-tuning as in `baton.pipelines.finetune` → promote or keep) → release, which also runs after a failure.
"""

from collections.abc import Mapping, Sequence

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from baton.components.retrain.component import look, promote_or_keep, release
from baton.errors import UserError
from baton.kfp import pod
from baton.pipelines import finetune
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.search import ACCEPTED
from baton.runs import ref


def retrain(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline that retrains the model of a recipe, which needs a gate."""
    require_gate(recipe)
    graphs = finetune.phase_graphs(recipe) if recipe.phases else finetune.inner_graphs(recipe)

    @dsl.pipeline(
        name=f"{recipe.name}-retrain",
        description=f"Trains {recipe.name} again if data or recipe have changed, and promotes what its gate accepts.",
        pipeline_config=pod.run_config(recipe.resources),
    )
    def pipeline(
        store: str = ref.encode_text(recipe.store.uri),
        source: str = "",
        base_model: str = ref.encode_text(recipe.model.base or ""),
        seed: int = recipe.seed,
        batch_size: int = 0 if recipe.phases else recipe.training.batch_size,
        overrides: dict[str, object] = {},  # noqa: B006 - kfp reads it
    ) -> None:
        """Looks for a change, trains, judges against the model in use, promotes or keeps.

        Args:
            store: Folder, s3://, gs:// or az:// bucket, for runs, data and the model in use.
            source: Rows to learn from instead of the recipe's, several joined by a comma. Empty: the recipe's.
            base_model: Model that training starts from: hub id, folder or URI. Empty: one from scratch.
            seed: Decides the split, initial weights, the order of rows and every random draw.
            batch_size: Rows per optimizer step. 0: the recipe's, as with phases.
            overrides: Other settings of the recipe by their paths, such as {"training.weight_decay": 0.1}; those of a
                phase after its name. Another value counts as a change of the recipe.
        """
        owner = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        last = _placed(release(model=recipe.name, store=store, owner=owner), recipe, "release")
        with dsl.ExitHandler(last, "one at a time"):
            given = {"base_model": base_model, "seed": seed, "overrides": overrides}
            document = ref.pack_text(load.dumps(recipe))
            seen = look(recipe=document, store=store, source=source, batch_size=batch_size, owner=owner, **given)
            outputs = _placed(seen, recipe, "look").outputs
            with dsl.If(outputs["Output"] == "train", "changed"):
                _placed(_trained(recipe, graphs, outputs, store, given), recipe, "promote or keep")

    return pipeline


def require_gate(recipe: Recipe) -> None:
    """Makes sure that a new model is judged before it takes the place of the one in use."""
    judged = (recipe.phase_recipes() or [recipe])[-1].evaluation
    if not judged.gate:
        raise UserError(
            f"recipe {recipe.name!r} has no evaluation.gate, and a retraining promotes what its gate accepts.",
            remedy=f'Set evaluation.production to {ACCEPTED} and a gate, such as {{loss: "<= production"}}.',
        )


def _trained(
    recipe: Recipe,
    graphs: Sequence[finetune.Graph],
    outputs: Mapping[str, finetune.Value],
    store: finetune.Value,
    given: Mapping[str, finetune.Given],
) -> dsl.PipelineTask:
    """Adds the stages of the fine-tuning; returns the last, which promotes its model or keeps the one in use."""
    run_name = outputs["run_name"]
    if recipe.phases:
        return promote_or_keep(baton=finetune.phases(recipe, graphs, run_name, store, given).baton)
    split = finetune.split_task(recipe, store, run_name=run_name, document=outputs["changed"])
    return promote_or_keep(baton=finetune.stages(recipe, split, graphs).baton)


def _placed(task: dsl.PipelineTask, recipe: Recipe, name: str) -> dsl.PipelineTask:
    task.set_display_name(name)
    pod.on_every_pod(task, recipe.resources, recipe.name, task.component_spec.name)
    pod.with_signatures(task, (recipe.phase_recipes() or [recipe])[-1])
    return task
