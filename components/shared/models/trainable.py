"""Makes a model trainable: unpacks its weights, attaches an adapter, or frees some of them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.models import vocabulary
from baton.components.shared.recipe import Adapter, Recipe, Trainable

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rows:
    """Rows of layers that are trained for themselves.

    Attributes:
        by_layer: Their numbers by the layer's name; none of a layer that is trained in full.
        shares: Whether such a layer shares its weight with another, which is then trained in full as well.
    """

    by_layer: dict[str, list[int]]
    shares: bool


def unpacked(folder: str) -> dict[str, Any]:
    """Returns what `from_pretrained` is told beside the folder of a model whose files hold MXFP4, as gpt-oss' do.

    Left to itself it keeps them packed wherever there are kernels that compute with them, and `Trainer` refuses to
    train those; elsewhere it warns, and unpacks them.

    Args:
        folder: Local files.
    """
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        packed = json.load(file).get("quantization_config") or {}
    if packed.get("quant_method") != "mxfp4":
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def lora(recipe: Recipe, rows: Rows | None = None) -> LoraConfig | None:
    """Returns PEFT's configuration of the recipe's adapter, None without one.

    Args:
        recipe: The recipe.
        rows: Those of new tokens; see `rows_of_tokens`.
    """
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


def rows_of_tokens(recipe: Recipe, model: Any, tokenizer: PreTrainedTokenizerBase) -> Rows | None:
    """Returns the rows that an adapter trains because their tokens are new, None without an adapter or such tokens.

    Raises:
        UserError: the adapter is to adapt a layer of such rows, too, PEFT does not know that kind of layer, or a recipe
            without adapter has frozen it.
    """
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
    return Rows(by_layer, shares=shares and bool(whole))


def _require_rows(adapter: Adapter, layer: str, module: Any) -> None:
    targets = adapter.target_modules
    if re.fullmatch(targets, layer) if isinstance(targets, str) else _is_in(targets or [], layer):
        reason = "an adapter on it would not reach them"
    elif getattr(module, "bias", None) is not None:
        reason = "PEFT trains none of a layer that has a bias"
    else:
        return
    raise UserError(
        f"model.tokenizer: {layer} has rows of new tokens, which are trained beside the adapter, and {reason}.",
        remedy="Leave it out of adapter.target_modules, and train it in full: adapter.modules_to_save.",
    )


def complete(model: Any) -> None:
    """Gives an output layer whose rows are trained for themselves what losses that compute with its weight ask for."""
    from peft.utils.other import TrainableTokensWrapper

    head = model.get_output_embeddings()
    if isinstance(head, TrainableTokensWrapper):
        vars(head)["bias"] = None  # which has a weight in PEFT's eyes, and nothing else


def _is_in(names: list[str], layer: str) -> bool:
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def freeze(model: nn.Module, trainable: Trainable) -> None:
    """Freezes all weights but those of the last blocks and those whose name fits a pattern.

    Raises:
        UserError: nothing is left to train.
    """
    wanted = {id(parameter) for block in _last_blocks(model, trainable.last_layers) for parameter in block.parameters()}
    for name, parameter in model.named_parameters():
        fits = any(re.search(pattern, name) for pattern in trainable.patterns)
        parameter.requires_grad_(fits or id(parameter) in wanted)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        names = ", ".join(sorted({name.rsplit(".", 2)[-2] for name, _ in model.named_parameters() if "." in name}))
        raise UserError(
            f"training.trainable {trainable.patterns} fits no parameter.", remedy=f"Layers of this model: {names}."
        )


def blocks(model: Any) -> list[nn.Module]:
    """Returns the transformer blocks of a model in their order, none where they cannot be told."""
    from torch import nn

    total = model.config.get_text_config().num_hidden_layers
    return list(next((x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == total), []))


def _last_blocks(model: Any, count: int) -> list[nn.Module]:
    if not count:
        return []
    layers = blocks(model)
    if count > len(layers):
        total = model.config.get_text_config().num_hidden_layers
        raise UserError(f"training.trainable.last_layers is {count}, the model has {total} blocks.")
    return layers[-count:]
