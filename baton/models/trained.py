"""A run's trained model: its newest checkpoint, loaded and checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from baton.checkpoint import sharded
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError, ExactnessError
from baton.models import loading, train_rows, user_code
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.run import Run, state_identity
from baton.store import bundle
from baton.store.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def final_checkpoint(run: Run) -> Checkpoint:
    """Returns the checkpoint of a run's last step, or where early stopping ended it."""
    store, last = CheckpointStore(run), run.plan().num_steps
    newest = store.read(last) or store.newest()
    if newest and (newest.step == last or newest.meta.finished):
        newest.require_continued("checkpoint")
        return newest
    raise BatonError(
        f"run {run.name!r} is at step {newest.step if newest else 0} of {last}: its chunks, spare ones included, did "
        "not reach the end.",
        remedy=f"Resume it with `baton run RECIPE --run {run.name}`, or submit the pipeline again with run_name="
        f"{run.name}; chunks.extra adds chunks for machines that are preempted.",
    )


def chosen_checkpoint(run: Run) -> Checkpoint:
    """Returns the checkpoint of a run's result: the last, or the best by `export.checkpoint`."""
    last = final_checkpoint(run)
    if run.recipe().export.checkpoint == "last":
        return last
    store = CheckpointStore(run)
    losses = store.evaluation_losses(last)
    measured = [checkpoint for checkpoint in store.committed() if checkpoint.step in losses]
    chosen = min(measured, key=lambda checkpoint: (losses[checkpoint.step], checkpoint.step), default=last)
    chosen.require_continued("checkpoint")
    return chosen


def require_origin(run: Run) -> None:
    """Checks a run against the identity in its result's checkpoint, before code of it is imported."""
    checkpoint = chosen_checkpoint(run)
    if checkpoint.meta.identity not in ("", state_identity(run, run.resolved_recipe(), run.plan())):
        raise ExactnessError(
            f"recipe, data, model, code or plan of run {run.name!r} are not those that its checkpoint of step "
            f"{checkpoint.step} was trained from. No code of it has been imported.",
            remedy=f"`baton verify checkpoints {run.uri}` shows the difference; start another run, or undo it.",
        )


def final_folder(run: Run, scratch: str, checkpoint: Checkpoint | None = None) -> str:
    """Returns a local folder with the result's checkpoint, every byte checked, shards put together."""
    chosen = checkpoint or chosen_checkpoint(run)
    return sharded.as_whole(CheckpointStore(run).fetch(chosen, f"{scratch}/checkpoint"), scratch)


def tokens_folder(run: Run, scratch: str, parts: Collection[str] | None = None) -> str:
    """Returns a local folder with the run's tokens, or `parts` of them, every byte checked."""
    prefix, manifest = tokens_manifest(run)
    names = [name for name in manifest.files if parts is None or name.partition("/")[0] in parts]
    return bundle.fetch(run.storage, prefix, manifest, f"{scratch}/tokens", names=names)


def tokens_manifest(run: Run) -> tuple[str, Manifest]:
    """Returns prefix and manifest of the run's tokens."""
    prefix = run.need(TokenizedRows).prefix
    manifest = read_manifest(run.storage, prefix)
    if manifest is None:
        raise BatonError(f"{run.storage.uri(prefix)} is gone.", remedy="Run the tokenize stage again.")
    return prefix, manifest


def base_folder(recipe: Recipe) -> str | None:
    """Returns a local folder with the base model's files, None for a model from scratch."""
    if recipe.model.base is None:
        return None
    folder = loading.local_model(recipe.model.base, recipe.model.revision, store=recipe.store)
    return user_code.trusted_model(recipe, "model.base", folder)


def trained_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: str, *, whole: bool = False
) -> PreTrainedModel:
    """Loads a checkpoint's model, an adapter on its base; with `whole` in full precision, to be merged."""
    if whole and recipe.model.quantization:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantization": None})})
    if recipe.adapter is None:
        return loading.load_model(user_code.trusted_model(recipe, "checkpoint", folder), recipe)
    return loading.adapted(loading.start_model(recipe, tokenizer, base_folder(recipe)), folder, tokenizer)


def open_rows(folder: str) -> Dataset:
    """Opens the tokenized rows of a side, by its folder."""
    import datasets

    return train_rows.readable(datasets.load_from_disk(folder))
