"""A recipe's model without its weights: shapes and types, to count what it takes."""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING, Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.models import loading, trainable
from baton.components.shared.recipe import NamedModel, Recipe
from baton.components.shared.store.storage import Storage

if TYPE_CHECKING:
    from torch import nn

PATIENCE = 10
"""Seconds to wait for the hub."""


def build(recipe: Recipe) -> nn.Module:
    """Returns what would be trained, on torch's meta device: frozen and adapted as in training, but without numbers.

    Raises:
        UserError: the model's configuration cannot be read, or the adapter does not fit it.
    """
    import torch
    from transformers.initialization import no_init_weights

    config = configuration(recipe)
    dtype = getattr(torch, recipe.model.dtype)
    own_code = {"trust_remote_code": True} if recipe.model.trust_remote_code else {}
    try:
        with torch.device("meta"), no_init_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of one library on another
            model: nn.Module = loading.auto_class(recipe).from_config(config, dtype=dtype, **own_code)
            model.tie_weights()  # type: ignore[operator]
            if recipe.training.trainable:
                trainable.freeze(model, recipe.training.trainable)
            return _in_shards(_adapted(model, recipe) if recipe.adapter else model, recipe)
    except (ValueError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise UserError(f"the model cannot be laid out: {type(error).__name__}: {_short(error)}") from None


@functools.cache
def _second(named: NamedModel, dtype: str) -> nn.Module:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    own_code = {"trust_remote_code": True} if named.trust_remote_code else {}
    config = _of_base(named.base, named.revision, named.trust_remote_code)
    with torch.device("meta"), no_init_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **own_code)
        model.tie_weights()  # type: ignore[operator]
    return model


def build_second(recipe: Recipe) -> nn.Module:
    """Returns the second model that the recipe's method names, on torch's meta device.

    Raises:
        UserError: its configuration cannot be read.
    """
    assert recipe.training.second_model
    _, named = recipe.training.second_model
    try:
        return _second(named, named.dtype or recipe.model.dtype)
    except Exception as error:  # whatever hub, store or configuration have to say
        raise UserError(
            f"the configuration of model {named.base!r} cannot be read: {type(error).__name__}: {_short(error)}"
        ) from None


def configuration(recipe: Recipe) -> Any:
    """Returns the Transformers configuration of the recipe's model.

    Raises:
        UserError: it cannot be read.
    """
    spec = recipe.model
    try:
        if spec.from_scratch:
            config = loading.scratch_config(spec.from_scratch, None, recipe.data.max_length)
            config.vocab_size = _vocabulary(recipe)
            config.pad_token_id = None
        else:
            config = _of_base(spec.base or "", spec.revision, spec.trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # whatever hub, store or configuration have to say
        of_tokenizer = spec.tokenizer.base if spec.from_scratch and spec.tokenizer else None
        what = f"tokenizer {of_tokenizer!r}" if of_tokenizer else f"the configuration of model {spec.base!r}"
        raise UserError(f"{what} cannot be read: {type(error).__name__}: {_short(error)}") from None
    if recipe.training.spec.scores:
        config.num_labels = 1
    return config


def _in_shards(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Returns the model in the number types of its shards: with autocast, Accelerate holds what is trained in fp32."""
    if recipe.world_size > 1 and recipe.parallel.is_sharded and recipe.training.precision in ("bf16", "fp16"):
        for value in model.parameters():
            if value.requires_grad:
                value.data = value.data.float()
    return model


def _adapted(model: nn.Module, recipe: Recipe) -> nn.Module:
    from peft import get_peft_model

    assert recipe.adapter
    plain = recipe.adapter.model_copy(update={"init": "default"})  # the others compute with the weights
    settings = trainable.lora(recipe.model_copy(update={"adapter": plain}))
    adapted: nn.Module = get_peft_model(model, settings, low_cpu_mem_usage=True)
    return adapted


def _of_base(base: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if os.path.isdir(base):
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    if "://" not in base:
        return _of_hub(base, revision, trust_remote_code)
    with scratch_folder("config") as folder:
        with open(os.path.join(folder, "config.json"), "wb") as file:
            file.write(Storage(base).read("config.json"))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)  # its code is not here


def _of_hub(base: str, revision: str | None, trust_remote_code: bool) -> Any:
    import huggingface_hub
    from transformers import AutoConfig

    here = isinstance(huggingface_hub.try_to_load_from_cache(base, "config.json", revision=revision), str)
    if not here:  # one request first, as fetching tries for half a minute
        huggingface_hub.HfApi().model_info(base, revision=revision, timeout=PATIENCE)
    return AutoConfig.from_pretrained(
        base, revision=revision, local_files_only=here, trust_remote_code=trust_remote_code
    )


def _vocabulary(recipe: Recipe) -> int:
    """Returns the rows of the embedding of a model from scratch; a tokenizer still to be trained may end on fewer."""
    spec, tokenizer = recipe.model.from_scratch, recipe.model.tokenizer
    assert spec
    assert tokenizer
    if tokenizer.train:
        return max(spec.vocab_size or 0, tokenizer.train.vocab_size)
    from transformers import AutoTokenizer

    return max(spec.vocab_size or 0, len(AutoTokenizer.from_pretrained(tokenizer.base, trust_remote_code=False)))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
