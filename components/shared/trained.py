"""The model that a run has come to: its newest checkpoint, loaded and checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from components.shared import models, sharded
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import BatonError
from components.shared.recipe import Recipe
from components.shared.runs import Run
from components.shared.store import bundles
from components.shared.store.bundles import Manifest
from components.shared.store.cache import NodeCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def final_checkpoint(run: Run) -> tuple[int, Manifest]:
    """Returns the checkpoint that the run ended on: of its last step, or where early stopping ended it.

    Raises:
        BatonError: the run has not come that far.
    """
    last = run.plan().num_steps
    manifest = CheckpointStore(run).manifest(last)
    if manifest is None:
        committed = [(step, found) for step, found in CheckpointStore(run).committed() if isinstance(found, Manifest)]
        if committed and committed[0][1].meta.get("finished"):
            return committed[0]
        newest = committed[0][0] if committed else 0
        raise BatonError(
            f"run {run.name!r} is at step {newest} of {last}: its chunks, spare ones included, did not reach the end.",
            remedy=f"Go on with `baton run RECIPE --run {run.name}`, or submit the pipeline again with run_name="
            f"{run.name}; chunks.spare adds chunks for machines that are taken away.",
        )
    return last, manifest


def chosen_checkpoint(run: Run) -> tuple[int, Manifest]:
    """Returns the checkpoint that the run's result is taken from: the last, or the best where `export.checkpoint` asks.

    Raises:
        BatonError: the run has not come to its end.
    """
    last, manifest = final_checkpoint(run)
    if run.recipe().export.checkpoint == "last":
        return last, manifest
    store = CheckpointStore(run)
    losses = store.evaluation_losses(last, manifest)
    committed = {step: found for step, found in store.committed() if isinstance(found, Manifest) and step in losses}
    if not committed:
        return last, manifest
    best = min(committed, key=lambda step: (losses[step], step))
    return best, committed[best]


def final_folder(run: Run, scratch: str) -> str:
    """Returns a local folder with the files of the checkpoint that the result is taken from, every byte checked.

    Of one in shards it has the model put together, and not what only training needs.

    Raises:
        DamagedError: the checkpoint is not what was committed.
    """
    step, manifest = chosen_checkpoint(run)
    return sharded.as_whole(CheckpointStore(run).fetch(step, manifest, f"{scratch}/checkpoint"), scratch)


def tokens_folder(run: Run, scratch: str, cache: NodeCache | None = None, parts: Collection[str] | None = None) -> str:
    """Returns a local folder with the run's tokenized rows and tokenizer, every byte checked.

    Args:
        run: The run.
        scratch: Folder for downloads.
        cache: Files this node has already.
        parts: Folders that are wanted, of `tokenizer`, `train`, `eval` and `test`; all when None.

    Raises:
        BatonError: they are gone.
    """
    prefix, manifest = tokens_manifest(run)
    names = [name for name in manifest.files if parts is None or name.partition("/")[0] in parts]
    return bundles.fetch(run.storage, prefix, manifest, f"{scratch}/tokens", cache, names)


def tokens_manifest(run: Run) -> tuple[str, Manifest]:
    """Returns where the run's tokens are, and what is committed there.

    Raises:
        BatonError: they are gone.
    """
    prefix = run.require("tokens.json")["prefix"]
    manifest = bundles.read_manifest(run.storage, prefix)
    if manifest is None:
        raise BatonError(f"{run.storage.uri(prefix)} is gone.", remedy="Run the tokenize stage again.")
    return prefix, manifest


def base_folder(recipe: Recipe) -> str | None:
    """Returns a local folder with the base model's files, None for a model from scratch."""
    return models.local_model(recipe.model.base, recipe.model.revision) if recipe.model.base else None


def trained_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: str, *, whole: bool = False
) -> PreTrainedModel:
    """Loads what training came to; an adapter is put on its base.

    Args:
        recipe: The resolved recipe.
        tokenizer: Sizes the embeddings of a model from scratch.
        folder: Files of a checkpoint.
        whole: Take the base in full precision even where it was held in few bits: to merge the adapter into it.
    """
    if whole and recipe.model.quantization:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantization": None})})
    if recipe.adapter is None:
        return models.load_model(folder, recipe)
    from peft import PeftModel

    return PeftModel.from_pretrained(models.start_model(recipe, tokenizer, base_folder(recipe)), folder)
