"""The model that a run has come to: its newest checkpoint, loaded and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.shared import bundles, models
from components.shared.bundles import Manifest
from components.shared.cache import NodeCache
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import BatonError
from components.shared.recipe import Recipe
from components.shared.runs import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def final_checkpoint(run: Run) -> tuple[int, Manifest]:
    """Returns the checkpoint of the run's last step.

    Raises:
        BatonError: the run has not come that far.
    """
    last = run.plan().num_steps
    manifest = CheckpointStore(run).manifest(last)
    if manifest is None:
        newest = max(
            (step for step, found in CheckpointStore(run).committed() if isinstance(found, Manifest)), default=0
        )
        raise BatonError(
            f"run {run.name!r} is at step {newest} of {last}: its chunks, spare ones included, did not reach the end.",
            remedy=f"Go on with `baton run RECIPE --run {run.name}`, or submit the pipeline again with run_name="
            f"{run.name}; chunks.spare adds chunks for machines that are taken away.",
        )
    return last, manifest


def final_folder(run: Run, scratch: str) -> str:
    """Returns a local folder with the files of the run's last checkpoint, every byte checked."""
    step, manifest = final_checkpoint(run)
    return CheckpointStore(run).fetch(step, manifest, f"{scratch}/checkpoint")


def tokens_folder(run: Run, scratch: str, cache: NodeCache | None = None) -> str:
    """Returns a local folder with the run's tokenized rows and tokenizer, every byte checked.

    Raises:
        BatonError: they are gone.
    """
    prefix = run.require("tokens.json")["prefix"]
    manifest = bundles.read_manifest(run.storage, prefix)
    if manifest is None:
        raise BatonError(f"{run.storage.uri(prefix)} is gone.", remedy="Run the tokenize stage again.")
    return bundles.fetch(run.storage, prefix, manifest, f"{scratch}/tokens", cache)


def base_folder(recipe: Recipe) -> str | None:
    """Returns a local folder with the base model's files, None for a model from scratch."""
    return models.local_model(recipe.model.base, recipe.model.revision) if recipe.model.base else None


def trained_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: str) -> PreTrainedModel:
    """Loads what training came to; an adapter is put on its base."""
    import torch

    dtype = getattr(torch, recipe.model.dtype)
    if recipe.adapter is None:
        return models.load_model(folder, dtype=dtype, trust_remote_code=recipe.model.trust_remote_code)
    from peft import PeftModel

    return PeftModel.from_pretrained(models.start_model(recipe, tokenizer, base_folder(recipe)), folder)
