"""Saves a model of which part is frozen: what is not trained in files of its own, the same in each checkpoint.

    model-00001-of-00002.safetensors   the frozen weights, in one file or several
    model-00002-of-00002.safetensors   all others
    model.safetensors.index.json       which weight is where

`from_pretrained` reads such a folder as any other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHARD_SIZE = "1GB"
"""Largest file of frozen weights: a store copies one in a single request, and several at a time."""
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"
Save = Callable[..., None]


def names(model: PreTrainedModel) -> set[str]:
    """Returns the names of the weights that are not trained, under each name that a shared one has."""
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}


def apart(model: PreTrainedModel, save: Save) -> Save:
    """Returns a `save_pretrained` that keeps frozen weights apart from the others.

    Args:
        model: The model.
        save: Its own.
    """

    def save_apart(
        folder: str, *rest: Any, state_dict: Mapping[str, torch.Tensor] | None = None, **options: Any
    ) -> None:
        weights = model.state_dict() if state_dict is None else state_dict
        frozen = names(model)
        kept = {name: value for name, value in weights.items() if name in frozen}
        trained = {name: value for name, value in weights.items() if name not in frozen}
        if not kept or not trained:
            save(folder, *rest, state_dict=state_dict, **options)
            return
        beside = os.path.join(folder, ".frozen")
        try:
            save(beside, *rest, state_dict=kept, **{**options, "max_shard_size": SHARD_SIZE})
            save(folder, *rest, state_dict=trained, **options)
            _join(folder, [beside, folder], sum(weight.numel() for weight in model.parameters()))
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    return save_apart


def _join(folder: str, parts: list[str], total: int) -> None:
    """Makes the files with weights of several folders those of one model, in this order."""
    files = [os.path.join(part, name) for part in parts for name in sorted(os.listdir(part)) if name.endswith(WEIGHTS)]
    renamed = {file: f"model-{number:05d}-of-{len(files):05d}{WEIGHTS}" for number, file in enumerate(files, 1)}
    where: dict[str, str] = {}
    size = 0
    for file, name in renamed.items():
        size += os.path.getsize(file)
        where |= dict.fromkeys(_weights(file), name)
    # Under names that none of them has: those of the one part may be those of the other.
    for file, name in renamed.items():
        os.replace(file, os.path.join(folder, f".{name}"))
    for name in renamed.values():
        os.replace(os.path.join(folder, f".{name}"), os.path.join(folder, name))
    index = {"metadata": {"total_parameters": total, "total_size": size}, "weight_map": where}
    with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as document:
        json.dump(index, document, indent=2, sort_keys=True)


def _weights(file: str) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
