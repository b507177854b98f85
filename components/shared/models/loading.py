"""Models and tokenizers: where they come from, and what exactly was taken."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from typing import TYPE_CHECKING, Any

from baton.components.shared.core import near
from baton.components.shared.core.errors import UserError
from baton.components.shared.core.machine import cache_dir
from baton.components.shared.models import today, trainable, vocabulary
from baton.components.shared.recipe import FromScratch, Recipe
from baton.components.shared.store import bundles
from baton.components.shared.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ".safetensors"
WANTED = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".py")
"""Ends of the names of a model's files that are taken, from the hub or a store: no pickled weights among them."""
IDENTITY = tuple(end for end in WANTED if end != ".py")
"""Those that a model's identity is made of; its code has a digest of its own, `own_code.remote.digest`."""
TAKEN = ".taken"
"""What a folder has of a store: size and time of each file there."""


def local_model(base: str, revision: str | None = None, *, weights: bool = True) -> str:
    """Returns a local folder with a model's files, fetched if need be.

    Args:
        base: Hub id, folder or URI.
        revision: Branch, tag or commit of a hub id.
        weights: Whether they are needed; else they may be missing.

    Raises:
        UserError: there is no such model, or it cannot be reached.
    """
    if os.path.isdir(base):
        return os.path.abspath(base)
    if "://" in base:
        return _from_store(base, weights=weights)
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        raise UserError(f"model {base!r} is not a folder.", remedy="Give a hub id, an existing folder or a URI.")
    from huggingface_hub import snapshot_download

    wanted = [f"*{end}" for end in WANTED if weights or end != WEIGHTS]
    try:
        return str(snapshot_download(base, revision=revision, allow_patterns=wanted))
    except Exception as error:
        raise UserError(
            f"model {base!r} cannot be had from the hub: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            remedy="Check the id and revision, HF_TOKEN for a private model, and the network.",
        ) from None


def model_identity(folder: str) -> str:
    """Returns the SHA-256 over names and contents of a model folder's files, weights included."""
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and name.endswith(IDENTITY):
            digest.update(f"{name} {bundles.file_sha256(path)}\n".encode())
    return digest.hexdigest()


def load_tokenizer(folder: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a local folder."""
    from transformers import AutoTokenizer

    today.hold()
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def start_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, base_folder: str | None, *, weights: bool = True
) -> PreTrainedModel:
    """Builds what training starts from; the same call gives the same weights in any process.

    Args:
        recipe: The resolved recipe.
        tokenizer: Sizes the embeddings of a model from scratch.
        base_folder: Local files of `model.base`.
        weights: Whether they are needed; left undefined for a checkpoint that is about to be loaded over them.
    """
    import torch
    from transformers import set_seed
    from transformers.initialization import no_init_weights

    # What is drawn below, such as weights from scratch, then depends on nothing that was drawn before.
    set_seed(recipe.seed)
    if recipe.model.from_scratch:
        config = scratch_config(recipe.model.from_scratch, tokenizer, recipe.data.max_length)
        config.num_labels = 1 if recipe.training.spec.scores else config.num_labels
        attention = {"attn_implementation": recipe.model.attention} if recipe.model.attention else {}
        with contextlib.nullcontext() if weights else no_init_weights():
            dtype = getattr(torch, recipe.model.dtype)
            model: PreTrainedModel = auto_class(recipe).from_config(config, dtype=dtype, **attention)
        model.tie_weights()  # which is left out with the weights, and a head of its own would have no state to restore
        return model
    model = load_model(base_folder or "", recipe)
    if recipe.model.tokenizer:
        vocabulary.align(vocabulary.grow(model, tokenizer), tokenizer)
    return model


def adapted(base: PreTrainedModel, folder: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Puts an adapter on its base, which is given the rows that the adapter's tokens need.

    Args:
        base: The base as it was before training.
        folder: Local files of the adapter.
        tokenizer: The tokenizer that lies with it.
    """
    from peft import PeftModel

    adapted: PreTrainedModel = PeftModel.from_pretrained(vocabulary.grow(base, tokenizer), folder)
    return adapted


def vocabulary_size(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, base_folder: str | None) -> int:
    """Returns the rows of the embedding of what training starts from.

    Args:
        recipe: The recipe.
        tokenizer: Sizes the embeddings; its new tokens are counted, where they are noted in it.
        base_folder: Local files of `model.base`.
    """
    if recipe.model.from_scratch:
        config = scratch_config(recipe.model.from_scratch, tokenizer, recipe.data.max_length)
        return int(config.get_text_config().vocab_size)
    return max(base_rows(recipe, base_folder), *(number + 1 for number in vocabulary.new_ids(tokenizer)), 0)


def base_rows(recipe: Recipe, base_folder: str | None) -> int:
    """Returns the rows of the embedding of `model.base`, by its configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base_folder, trust_remote_code=recipe.model.trust_remote_code)
    return int(config.get_text_config().vocab_size)


def second_model(recipe: Recipe, folder: str) -> PreTrainedModel:
    """Loads the second model that a recipe's method names; it writes, and is not trained.

    Args:
        recipe: The recipe.
        folder: Its local files.
    """
    import torch
    from transformers import AutoModelForCausalLM

    assert recipe.training.second_model
    _, named = recipe.training.second_model
    _require_writer(folder)
    attention = {"attn_implementation": recipe.model.attention} if recipe.model.attention else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        use_safetensors=True,
        dtype=getattr(torch, named.dtype or recipe.model.dtype),
        trust_remote_code=named.trust_remote_code,
        **attention,
    )
    return model.requires_grad_(False).eval()


def auto_class(recipe: Recipe) -> Any:
    """Returns the class that loads the recipe's kind of model: one that writes, or one that scores."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if recipe.training.spec.scores else AutoModelForCausalLM


def load_model(folder: str, recipe: Recipe | None = None, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Loads a model from safetensors files; pickled weights are refused.

    Args:
        folder: Local files.
        recipe: Says kind, type, quantization, attention and more; a causal language model as it was saved without one.
        trust_remote_code: Run Python code that comes with it, where no recipe says.
    """
    from transformers import AutoModelForCausalLM

    kind, settings = AutoModelForCausalLM, trainable.unpacked(folder)
    is_packed = bool(settings)
    if recipe is None:
        _require_writer(folder)
        settings["trust_remote_code"] = trust_remote_code
    else:
        kind, settings = auto_class(recipe), settings | load_settings(recipe)
        settings |= {"num_labels": 1} if recipe.training.spec.scores else {}
    model: PreTrainedModel = kind.from_pretrained(folder, use_safetensors=True, **settings)
    if is_packed:
        model._weight_conversions = None  # else it is saved under the names of packed weights, which nothing reads
    return model


def _require_writer(folder: str) -> None:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        kinds = json.load(file).get("architectures") or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise UserError(f"{folder} is a reward model: it scores texts and writes none.", remedy="Name another model.")


def load_settings(recipe: Recipe) -> dict[str, object]:
    """Returns what `from_pretrained` is told beside the folder."""
    import torch

    spec = recipe.model
    settings: dict[str, object] = {"dtype": getattr(torch, spec.dtype), "trust_remote_code": spec.trust_remote_code}
    if spec.attention:
        settings["attn_implementation"] = spec.attention
    if spec.quantization:
        from transformers import BitsAndBytesConfig

        few = spec.quantization
        settings["quantization_config"] = (
            BitsAndBytesConfig(load_in_8bit=True)
            if few.bits == 8
            else BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=few.type,
                bnb_4bit_use_double_quant=few.double,
                bnb_4bit_compute_dtype=getattr(torch, few.compute_dtype),
            )
        )
    return settings


def scratch_config(spec: FromScratch, tokenizer: PreTrainedTokenizerBase | None, max_length: int) -> Any:
    """Returns the Transformers configuration for a model from scratch.

    Raises:
        UserError: the architecture or one of its settings does not exist, or cannot be what is given.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if spec.architecture not in CONFIG_MAPPING_NAMES:
        hint = near.hint(spec.architecture, CONFIG_MAPPING_NAMES)
        raise UserError(f"model.from_scratch.architecture {spec.architecture!r} is no Transformers model type.{hint}")
    known = AutoConfig.for_model(spec.architecture)
    for key in spec.config:
        if not hasattr(known, key) or callable(getattr(known, key)):
            hint = near.hint(key, known.to_dict())
            raise UserError(f"model.from_scratch.config.{key} is no setting of {spec.architecture}.{hint}")
    settings = {
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads or spec.num_attention_heads,
        "intermediate_size": spec.intermediate_size or 4 * spec.hidden_size,
        "max_position_embeddings": max(max_length, getattr(known, "max_position_embeddings", max_length)),
        **spec.config,
    }
    if tokenizer is not None:
        settings["vocab_size"] = max(spec.vocab_size or 0, len(tokenizer))
        settings |= {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    try:
        return AutoConfig.for_model(spec.architecture, **settings)
    except (StrictDataclassError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"model.from_scratch makes no {spec.architecture}: {' '.join(str(error).split())}") from None


def _from_store(uri: str, *, weights: bool) -> str:
    """Returns a folder with a model of a store; what was taken before and has not changed there is not taken again."""
    storage = Storage(uri)
    objects = {} if storage.is_local else storage.find("")
    if not {"config.json", "adapter_config.json"} & set(objects or storage.list("")):
        raise UserError(f"model {uri!r} has no config.json.", remedy="Give the folder that holds the model's files.")
    if storage.is_local:
        return str(storage.root)
    target = os.path.join(cache_dir(), "models", hashlib.sha256(uri.encode()).hexdigest()[:16])
    if not weights:
        target += "-tokenizer"
    wanted = tuple(end for end in WANTED if weights or end != WEIGHTS)
    there = {
        name: [size, written.isoformat()]
        for name, (size, written) in objects.items()
        if name.endswith(wanted) and "/" not in name
    }
    if (taken := _taken(target)) != there:
        for name in taken.keys() - there.keys():  # gone from the store
            os.remove(os.path.join(target, name))
        for name in there:
            storage.download(name, os.path.join(target, name))
        with tempfile.NamedTemporaryFile("w", dir=target, delete=False, encoding="utf-8") as file:
            json.dump(there, file)
        # Last: a download that broke off left no note of these sizes and times, and is made again.
        os.replace(file.name, os.path.join(target, TAKEN))
    return target


def _taken(folder: str) -> dict[str, list[Any]]:
    """Returns size and time of the files that were taken from a store, as far as they are whole here."""
    try:
        with open(os.path.join(folder, TAKEN), encoding="utf-8") as file:
            taken: dict[str, list[Any]] = json.load(file)
        return {name: mark for name, mark in taken.items() if os.path.getsize(os.path.join(folder, name)) == mark[0]}
    except (OSError, ValueError):
        return {}
