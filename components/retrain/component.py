"""Retraining stages: look for changes before a fine-tuning, promote its model or keep the one in use."""

from kfp import dsl

from baton.kfp.component import component


@component
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
        recipe: The recipe as JSON, packed; every text as `baton.runs.ref` has it.
        store: Folder or bucket for runs and data.
        source: Rows to learn from; empty for those of the recipe.
        base_model: What training starts from; empty for the recipe's.
        seed: Decides every random draw.
        batch_size: Rows per optimizer step; 0 for the recipe's.
        overrides: Other settings of the recipe, by dotted path.
        owner: This retraining.
        changes: The changes found.
        run_name: Name of the run to train.
        changed: The recipe to train, packed, which may start from the model in use.

    Returns:
        `train`, `unchanged` where there is nothing to do, or `busy`.
    """
    from baton import events
    from baton.pages.card import DISPLAY_NAME
    from baton.recipe import load, parameters
    from baton.retrain import check_for_changes
    from baton.runs import ref
    from baton.store import sources

    with events.stage("look"):
        recipe, store, source = ref.decode_texts([recipe, store, source])
        base_model, overrides = ref.decode_texts([base_model, overrides])
        rows = sources.parse(source) if source else None
        given = parameters.given_parameters(
            store=store, source=rows, base_model=base_model, seed=seed, batch_size=batch_size
        )
        chosen = parameters.apply_parameters(load.loads(recipe), given, overrides)
        finding = check_for_changes(chosen, owner)
        changes.metadata[DISPLAY_NAME] = f"{chosen.name} · changes"
        words = f"**{finding.decision}**: {finding.words}\n"
        train = ref.pack_text(finding.recipe) if finding.recipe else ""
        for path, text in ((changes.path, words), (run_name, finding.run), (changed, train)):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    return finding.decision


@component
def promote_or_keep(baton: str) -> str:
    """Puts the new model in the place of the one in use, or keeps that.

    Args:
        baton: The run whose model it is.

    Returns:
        `promoted` or `rejected`.
    """
    from baton import events
    from baton.retrain import promote_or_keep
    from baton.runs.ref import RunRef

    with events.stage("promote or keep"):
        return promote_or_keep(RunRef.read(baton).run_uri)


@component
def release(model: str, store: str, owner: str, status: dsl.PipelineTaskFinalStatus):
    """Lets the next retraining begin, however this one went.

    Args:
        model: Name of the recipe.
        store: Folder or bucket.
        owner: This retraining.
        status: How it went.
    """
    from baton import events
    from baton.retrain import release_lock

    with events.stage("release"):
        release_lock(model, store, owner, status.error_message)
