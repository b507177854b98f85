"""The model as safetensors: whole, an adapter folded in, or the adapter alone."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from baton.components.shared.checkpoints.merging import TRAINING
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNITS = {"MB": 10**6, "GB": 10**9}


def write_whole(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, checkpoint: str, target: str
) -> None:
    """Writes the whole model; the checkpoint's own files are taken where they hold it as it was asked for.

    Args:
        model: The whole model, in the type asked for.
        tokenizer: Its tokenizer.
        recipe: Says type and shard size.
        checkpoint: Files of the checkpoint.
        target: Folder to write to.
    """
    spec = recipe.export
    changed = recipe.adapter or spec.dtype not in (None, recipe.model.dtype) or _has_experts(recipe, checkpoint)
    if not changed and _largest(checkpoint) <= _bytes(spec.shard_size):
        copy_model(checkpoint, target)
        return
    model.save_pretrained(target, max_shard_size=spec.shard_size)
    tokenizer.save_pretrained(target)


def copy_model(checkpoint: str, target: str) -> None:
    """Copies the files of a checkpoint that are of the model or the adapter."""
    for name in sorted(os.listdir(checkpoint)):
        if not TRAINING.match(name) and name != "README.md" and os.path.isfile(f"{checkpoint}/{name}"):
            shutil.copyfile(f"{checkpoint}/{name}", f"{target}/{name}")


def _largest(checkpoint: str) -> int:
    sizes = [
        os.path.getsize(f"{checkpoint}/{name}") for name in os.listdir(checkpoint) if name.endswith(".safetensors")
    ]
    return max(sizes, default=0)


def _bytes(size: str) -> int:
    return int(size[:-2]) * UNITS[size[-2:]]


def _has_experts(recipe: Recipe, checkpoint: str) -> bool:
    """Tells whether weights are of a mixture of experts, which a checkpoint holds under the names in memory."""
    from transformers import AutoConfig

    if not os.path.isfile(f"{checkpoint}/config.json"):
        return False
    runs_code = recipe.model.trust_remote_code
    config: Any = AutoConfig.from_pretrained(checkpoint, trust_remote_code=runs_code).get_text_config()
    return any(hasattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
