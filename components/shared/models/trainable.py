"""Makes a model trainable: attaches an adapter, or frees some of its weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, Trainable

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn


def lora(recipe: Recipe) -> LoraConfig | None:
    """Returns PEFT's configuration of the recipe's adapter, None without one."""
    adapter = recipe.adapter
    if adapter is None:
        return None
    from peft import LoraConfig

    scores = recipe.training.spec.scores
    saved = [*(adapter.modules_to_save or []), *(["score"] if scores else [])]
    settings: dict[str, Any] = {"init_lora_weights": adapter.init} if adapter.init != "default" else {}
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
