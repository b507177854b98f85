"""Trainable models (unpacked, with an adapter, or partly frozen), and frozen weights in files of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import UserError
from baton.models import vocabulary
from baton.recipe.model import Adapter
from baton.recipe.recipe import Recipe
from baton.recipe.training import Trainable

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SHARD_SIZE = "1GB"  # of frozen weights: a store copies a file in a single request, and several at a time
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"
Save = Callable[..., None]


@dataclass(frozen=True)
class TokenRows:
    by_layer: dict[str, list[int]]  # numbers by layer; none of a layer that is trained in full
    shares: bool  # whether a fully trained layer shares its weight with another, then fully trained as well


def unpacked(folder: str) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` that unpack a model in MXFP4, such as gpt-oss."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        packed = json.load(file).get("quantization_config") or {}
    if packed.get("quant_method") != "mxfp4":
        return {}
    from transformers import Mxfp4Config

    # Else they stay packed wherever kernels compute with them, and `Trainer` refuses to train packed weights.
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def sort_adapter_configs(folder: str) -> None:
    """Sorts the modules' names in adapter configurations, so that equal runs write equal files.

    PEFT 0.21 keeps them as sets, in an order that differs between processes.
    """
    for path in Path(folder).rglob("adapter_config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        names = {key: config.get(key) for key in ("target_modules", "exclude_modules")}
        config |= {key: sorted(value) for key, value in names.items() if isinstance(value, list)}
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def lora(recipe: Recipe, rows: TokenRows | None = None) -> LoraConfig | None:
    """Returns PEFT's configuration of the recipe's adapter, with `rows_of_tokens`."""
    adapter = recipe.adapter
    if adapter is None:
        return None
    from peft import LoraConfig

    scores = recipe.training.spec.scores
    saved = [*(adapter.modules_to_save or []), *(["score"] if scores else [])]
    settings: dict[str, Any] = {"init_lora_weights": adapter.init} if adapter.init != "default" else {}
    if rows:
        settings |= {"trainable_token_indices": rows.by_layer or None, "ensure_weight_tying": rows.shares}
    return LoraConfig(
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        exclude_modules=adapter.exclude_modules,
        target_parameters=adapter.target_parameters,
        modules_to_save=saved or None,
        layers_to_transform=adapter.layers_to_transform,
        bias=adapter.bias,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern=dict(adapter.alpha_pattern),
        **settings,
    )


def rows_of_tokens(recipe: Recipe, model: Any, tokenizer: PreTrainedTokenizerBase) -> TokenRows | None:
    """Returns the rows that an adapter trains because their tokens are new."""
    ids = vocabulary.new_ids(tokenizer)
    if not ids:
        return None
    layers = vocabulary.layers(model)
    if recipe.adapter is None:
        frozen = [name for name, layer in layers.items() if not layer.weight.requires_grad]
        if frozen and ids != [tokenizer.pad_token_id]:  # a filler is not learned
            names = ", ".join(frozen)
            raise UserError(
                f"training.trainable: {names} would be frozen, and {len(ids)} new tokens have nothing but the mean of "
                "the old ones there.",
                remedy=f"Add {names} to training.trainable.patterns, or leave out the tokens.",
            )
        return None
    saved = recipe.adapter.modules_to_save or []
    whole = {layer for layer in layers if _is_in(saved, layer)}
    shares = len({id(module.weight) for module in layers.values()}) < len(layers)
    if shares and whole:
        whole = {*layers}
    by_layer = {layer: ids for layer in list(layers)[: 1 if shares else None] if layer not in whole}
    for layer in layers.keys() - whole:
        _require_rows(recipe.adapter, layer, layers[layer])
    return TokenRows(by_layer, shares=shares and bool(whole))


def _require_rows(adapter: Adapter, layer: str, module: Any) -> None:
    targets = adapter.target_modules
    if re.fullmatch(targets, layer) if isinstance(targets, str) else _is_in(targets or [], layer):
        reason = "an adapter on it would not reach them"
    elif getattr(module, "bias", None) is not None:
        reason = "PEFT trains none of a layer that has a bias"
    else:
        return
    raise UserError(
        f"model.tokenizer: {layer} has rows of new tokens, which are trained with the adapter, and {reason}.",
        remedy="Leave it out of adapter.target_modules, and train it in full: adapter.modules_to_save.",
    )


def complete(model: Any) -> None:
    """Gives an output layer with trained rows the `bias` that losses computing with its weight ask for."""
    from peft.utils.other import TrainableTokensWrapper

    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        vars(head)["bias"] = None  # PEFT's wrapper has the weight alone


def _is_in(names: list[str], layer: str) -> bool:
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def freeze(model: nn.Module, trainable: Trainable) -> None:
    """Freezes all weights but those of the last blocks and those whose name fits a pattern."""
    layers, count = blocks(model) if trainable.last_layers else [], trainable.last_layers
    if count > len(layers):
        total: Any = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr,operator]
        raise UserError(f"training.trainable.last_layers is {count}, the model has {total} blocks.")
    wanted = {id(parameter) for block in layers[len(layers) - count :] for parameter in block.parameters()}
    for name, parameter in model.named_parameters():
        fits = any(re.search(pattern, name) for pattern in trainable.patterns)
        parameter.requires_grad_(fits or id(parameter) in wanted)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        names = ", ".join(sorted({name.rsplit(".", 2)[-2] for name, _ in model.named_parameters() if "." in name}))
        raise UserError(
            f"training.trainable {trainable.patterns} fits no parameter.", remedy=f"Layers of this model: {names}."
        )


def blocks(model: Any) -> list[nn.Module]:
    """Returns the transformer blocks of a model in order, none where they cannot be told."""
    from torch import nn

    total = model.config.get_text_config().num_hidden_layers
    return list(next((x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == total), []))


def frozen_names(model: PreTrainedModel) -> set[str]:
    """Returns the names of the frozen weights, under each name that a shared one has."""
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}


def save_frozen_separately(model: PreTrainedModel, save: Save) -> Save:
    """Returns a model's `save_pretrained`, `save`, with frozen weights in files of their own."""

    # `model-00001-of-00002.safetensors` has the frozen weights, or several such files, the last one all others, and the
    # index names each weight's file. `from_pretrained` reads such a folder as any other. Files of frozen weights are
    # the same in each checkpoint.
    def save_apart(
        folder: str, *rest: Any, state_dict: Mapping[str, torch.Tensor] | None = None, **options: Any
    ) -> None:
        weights = model.state_dict() if state_dict is None else state_dict
        frozen = frozen_names(model)
        kept = {name: value for name, value in weights.items() if name in frozen}
        trained = {name: value for name, value in weights.items() if name not in frozen}
        if not kept or not trained:
            save(folder, *rest, state_dict=state_dict, **options)
            return
        beside = os.path.join(folder, ".frozen")
        try:
            save(beside, *rest, state_dict=kept, **{**options, "max_shard_size": SHARD_SIZE})
            save(folder, *rest, state_dict=trained, **options)
            _join_folders(folder, [beside, folder], sum(weight.numel() for weight in model.parameters()))
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    return save_apart


def _join_folders(folder: str, parts: list[str], total: int) -> None:
    """Makes the weights' files of several folders those of one model, in this order."""
    from safetensors import safe_open

    files = [os.path.join(part, name) for part in parts for name in sorted(os.listdir(part)) if name.endswith(WEIGHTS)]
    renamed = {file: f"model-{number:05d}-of-{len(files):05d}{WEIGHTS}" for number, file in enumerate(files, 1)}
    where: dict[str, str] = {}
    size = 0
    for file, name in renamed.items():
        size += os.path.getsize(file)
        with safe_open(file, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), name)
    # Under new names first, as a final name may be that of another part's file.
    for file, name in renamed.items():
        os.replace(file, os.path.join(folder, f".{name}"))
    for name in renamed.values():
        os.replace(os.path.join(folder, f".{name}"), os.path.join(folder, name))
    index = {"metadata": {"total_parameters": total, "total_size": size}, "weight_map": where}
    with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as document:
        json.dump(index, document, indent=2, sort_keys=True)
