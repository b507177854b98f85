"""Retraining stages: what is looked at before a fine-tuning, and what becomes of its model."""

from kfp import dsl

from baton.components.declaring import stage


@stage
def look(
    recipe: str,
    store: str,
    source: str,
    base_model: str,
    seed: int,
    batch_size: int,
    overrides: dict,
    owner: str,
    changes: dsl.Output[dsl.Markdown],
    run_name: dsl.OutputPath(str),  # type: ignore[valid-type]
    changed: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> str:
    """Looks whether data or recipe have changed since a model was accepted, and takes the turn.

    Args:
        recipe: The recipe as JSON, packed; every text as `shared.core.wire` has it.
        store: Folder or bucket for runs and data.
        source: Rows to learn from; empty for those of the recipe.
        base_model: What training starts from; empty for the recipe's.
        seed: Decides every random draw.
        batch_size: Rows per optimizer step; 0 for the recipe's.
        overrides: Other settings of the recipe, by dotted path.
        owner: This retraining.
        changes: What was found.
        run_name: Name of the run to train.
        changed: The recipe to train, packed, which may start from the model in use.

    Returns:
        `train`, `unchanged` where there is nothing to do, or `busy`.
    """
    from baton.components.retrain.look import look
    from baton.components.shared.core import events, wire
    from baton.components.shared.pages.cards import DISPLAY_NAME
    from baton.components.shared.recipe import parameters, recipe_file
    from baton.components.shared.store import sources

    with events.stage("look"):
        recipe, store, source = wire.received([recipe, store, source])
        base_model, overrides = wire.received([base_model, overrides])
        rows = sources.parse(source) if source else None
        given = parameters.of(store=store, source=rows, base_model=base_model, seed=seed, batch_size=batch_size)
        chosen = parameters.changed(recipe_file.loads(recipe), given, overrides)
        finding = look(chosen, owner)
        changes.metadata[DISPLAY_NAME] = f"{chosen.name} · changes"
        words = f"**{finding.decision}**: {finding.words}\n"
        train = wire.pack(finding.recipe) if finding.recipe else ""
        for path, text in ((changes.path, words), (run_name, finding.run), (changed, train)):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return finding.decision


@stage
def promote_or_keep(baton: str) -> str:
    """Puts the new model in the place of the one in use, or keeps that.

    Args:
        baton: The run whose model it is.

    Returns:
        `promoted` or `rejected`.
    """
    from baton.components.retrain.promotion import promote_or_keep
    from baton.components.shared.core import events
    from baton.components.shared.runs.baton import Baton

    with events.stage("promote or keep"):
        return promote_or_keep(Baton.read(baton).run_uri)


@stage
def release(model: str, store: str, owner: str, status: dsl.PipelineTaskFinalStatus):
    """Lets the next retraining begin, however this one went.

    Args:
        model: Name of the recipe.
        store: Folder or bucket.
        owner: This retraining.
        status: How it went.
    """
    from baton.components.retrain.promotion import release
    from baton.components.shared.core import events

    with events.stage("release"):
        release(model, store, owner, status.error_message)
