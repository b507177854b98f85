"""Models and tokenizers: fetched, pinned by digest, loaded, counted and placed on devices."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from baton.checkpoint.chain import CHAIN_FILE
from baton.errors import UserError, suggest
from baton.machine import cache_dir
from baton.models import chat, gguf_file, trainable, user_code, vocabulary
from baton.recipe import extras
from baton.recipe.model import FromScratch
from baton.recipe.recipe import Recipe
from baton.recipe.run import Store
from baton.runs.run import EXPORTED
from baton.store import bundle
from baton.store.manifest import usable_manifest
from baton.store.storage import Storage

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# It asks for the package `kernels`, for products with weights in the layout that `_keep_layout` forbids.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

GPU_SHARE = 0.8  # of free memory for weights; activations and the keys of completions need the rest
WEIGHTS = ".safetensors"
MODEL_FILES = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".py")  # fetched; no pickled weights
IDENTITY = tuple(end for end in MODEL_FILES if end != ".py")  # code has its own digest, `user_code.model_digest`
TAKEN = ".taken"  # size and time of each file fetched from a store


def count_parameters(parameters: Iterable[torch.Tensor]) -> int:
    """Returns the numbers in parameters before they are packed or split over processes."""

    def count(value: torch.Tensor) -> int:
        packed = getattr(value, "quant_state", None)  # bitsandbytes' of 4 bits, two to a byte
        if packed is not None:
            return math.prod(packed.shape)
        whole = getattr(value, "ds_numel", None)  # ZeRO's stage 3 has an empty tensor in its place
        return value.numel() if whole is None else int(whole)

    return sum(map(count, parameters))


def place_model(model: Any) -> Any:
    """Puts a model on the CPU without a GPU, on the first one, or over as many as it needs."""
    import torch

    if getattr(model, "is_quantized", False):  # weights in few bits are on the accelerator already
        return model
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    spread = spread_over(model, {number: torch.cuda.mem_get_info(number)[0] for number in range(count)})
    if spread is None:
        return model.to("cuda" if count else "cpu")
    from accelerate import dispatch_model

    return dispatch_model(model, spread)


def move_to_cpu(model: Any) -> None:
    """Puts a placed model back on the CPU, so that another has the room."""
    from accelerate.hooks import remove_hook_from_submodules
    from torch import nn

    remove_hook_from_submodules(model)
    nn.Module.to(model, "cpu")  # that of a model that was spread is refused


def spread_over(model: nn.Module, free: Mapping[int, int]) -> dict[str, int] | None:
    """Returns the device of each part of a model, blocks uncut, by free bytes; None where one has room for all."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes

    room = {device: int(GPU_SHARE * size) for device, size in free.items()}
    size = compute_module_sizes(model)[""]
    if len(room) < 2 or size <= room[min(room)]:
        return None
    whole = list(getattr(model, "_no_split_modules", None) or [])
    # The map sends parts without room to the host's disk, where a model would answer for days: refused below.
    spread: dict[str, int] = infer_auto_device_map(model, dict([*room.items(), ("cpu", 0)]), whole)
    if not set(spread.values()) <= set(room):
        raise UserError(
            f"the model's weights are {size / 1e9:.1f} GB, and {len(room)} GPUs have {sum(room.values()) / 1e9:.1f} GB "
            "for them.",
            remedy="Raise resources.gpus, or hold the model in fewer bits: model.dtype.",
        )
    return spread


def local_model(base: str, revision: str | None = None, *, weights: bool = True, store: Store | None = None) -> str:
    """Returns a local folder with a model's files, fetched if need be; without `weights` they may be missing.

    A GGUF file is dequantized once for a store, else once for this machine.
    """
    if file := gguf_file.find(base, revision):
        return gguf_file.local_folder(file, store, weights=weights)
    if exported := EXPORTED.fullmatch(base):  # a damaged one is made again under another attempt's name
        storage = Storage(exported["store"])
        if manifest := usable_manifest(storage, exported["prefix"]):
            base = storage.uri(manifest.path(exported["prefix"]))
    if os.path.isdir(base):
        return os.path.abspath(base)
    if "://" in base:
        return _from_store(base, weights=weights)
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        raise UserError(f"model {base!r} is not a folder.", remedy="Give a hub id, an existing folder or a URI.")
    from huggingface_hub import snapshot_download

    wanted = [f"*{end}" for end in MODEL_FILES if weights or end != WEIGHTS]
    try:
        return str(snapshot_download(base, revision=revision, allow_patterns=wanted))
    except Exception as error:
        raise UserError(
            f"model {base!r} cannot be fetched from the hub: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}",
            remedy="Check the id and revision, HF_TOKEN for a private model, and the network.",
        ) from None


def model_identity(folder: str) -> str:
    """Returns the SHA-256 over names and contents of a model's files, weights included."""
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        # The seals of an export grow with each one that is made of the same model.
        if os.path.isfile(path) and name.endswith(IDENTITY) and name != CHAIN_FILE:
            digest.update(f"{name} {bundle.file_sha256(path)}\n".encode())
    return digest.hexdigest()


def load_tokenizer(folder: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a local folder."""
    from transformers import AutoTokenizer

    chat.hold_template_date()
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def start_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, base_folder: str | None, *, weights: bool = True
) -> PreTrainedModel:
    """Builds the start of training, the same weights in any process; without `weights` they are left undefined."""
    import torch
    from transformers import set_seed
    from transformers.initialization import no_init_weights

    # Draws below, such as weights from scratch, then depend on no earlier ones.
    set_seed(recipe.seed)
    if recipe.model.from_scratch:
        config = scratch_config(recipe.model.from_scratch, tokenizer, recipe.data.max_length)
        config.num_labels = 1 if recipe.training.spec.scores else config.num_labels
        attention = {"attn_implementation": recipe.model.attention} if recipe.model.attention else {}
        with contextlib.nullcontext() if weights else no_init_weights():  # before a checkpoint is loaded over them
            dtype = getattr(torch, recipe.model.dtype)
            model: PreTrainedModel = auto_class(recipe).from_config(config, dtype=dtype, **attention)
        model.tie_weights()  # left out with the weights; an untied head would have no state to restore
        return model
    model = load_model(base_folder or "", recipe)
    if recipe.model.tokenizer:
        vocabulary.align(vocabulary.resize_embeddings(model, tokenizer), tokenizer)
    return model


def adapted(base: PreTrainedModel, folder: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Puts an adapter on its base as it was before training, with rows for the adapter's tokens."""
    from peft import PeftModel

    adapted: PreTrainedModel = PeftModel.from_pretrained(vocabulary.resize_embeddings(base, tokenizer), folder)
    return adapted


def vocabulary_size(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, base_folder: str | None) -> int:
    """Returns the rows of the start model's embedding, new tokens included."""
    if recipe.model.from_scratch:
        config = scratch_config(recipe.model.from_scratch, tokenizer, recipe.data.max_length)
        return int(config.get_text_config().vocab_size)
    return max(base_rows(recipe, base_folder), *(number + 1 for number in vocabulary.new_ids(tokenizer)), 0)


def base_rows(recipe: Recipe, base_folder: str | None) -> int:
    """Returns the rows of the base's embedding, by its configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base_folder, trust_remote_code=recipe.model.trust_remote_code)
    return int(config.get_text_config().vocab_size)


def second_model(recipe: Recipe, folder: str) -> PreTrainedModel:
    """Loads the second model that a method names; it writes, and is not trained."""
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
    """Loads a model from safetensors files; without a recipe, as a causal language model in its saved type."""
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
    if recipe and recipe.model.quantization:
        _keep_layout(model)
    if is_packed:
        model._weight_conversions = None  # else it is saved under packed weights' names, which nothing reads
    return model


def _keep_layout(model: PreTrainedModel) -> None:
    """Keeps 4-bit weights as they are in evaluations.

    On CPUs with AVX512-BF16, bitsandbytes 0.50 would pack them for faster inference: their constants are rounded to
    bfloat16, and later training steps pass no gradient through them.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _require_writer(folder: str) -> None:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        kinds = json.load(file).get("architectures") or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise UserError(f"{folder} is a reward model: it scores texts and writes none.", remedy="Name another model.")


def load_settings(recipe: Recipe) -> dict[str, object]:
    """Returns the keyword arguments of `from_pretrained`."""
    import torch

    spec = recipe.model
    settings: dict[str, object] = {"dtype": getattr(torch, spec.dtype), "trust_remote_code": spec.trust_remote_code}
    if spec.attention:
        settings["attn_implementation"] = spec.attention
    if few := spec.quantization:
        from transformers import BitsAndBytesConfig

        extras.require_bitsandbytes(recipe)

        four_bits = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": few.type,
            "bnb_4bit_use_double_quant": few.double,
            "bnb_4bit_compute_dtype": getattr(torch, few.compute_dtype),
        }
        settings["quantization_config"] = BitsAndBytesConfig(**({"load_in_8bit": True} if few.bits == 8 else four_bits))
    return settings


def scratch_config(spec: FromScratch, tokenizer: PreTrainedTokenizerBase | None, max_length: int) -> Any:
    """Returns the Transformers configuration for a model from scratch."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if spec.architecture not in CONFIG_MAPPING_NAMES:
        hint = suggest(spec.architecture, CONFIG_MAPPING_NAMES)
        raise UserError(
            f"model.from_scratch.architecture {spec.architecture!r} is not a model type of Transformers.{hint}"
        )
    known = AutoConfig.for_model(spec.architecture)
    for key in spec.config:
        if not hasattr(known, key) or callable(getattr(known, key)):
            hint = suggest(key, known.to_dict())
            raise UserError(f"model.from_scratch.config.{key} is not a setting of {spec.architecture}.{hint}")
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
    """Returns a folder with a store's model; files that have not changed there are not fetched again."""
    storage = Storage(uri)
    objects = {} if storage.is_local else storage.find("")
    if not {"config.json", "adapter_config.json"} & set(objects or storage.list("")):
        raise UserError(f"model {uri!r} has no config.json.", remedy="Give the folder that holds the model's files.")
    if storage.is_local:
        return str(storage.root)
    target = os.path.join(cache_dir(), "models", hashlib.sha256(uri.encode()).hexdigest()[:16])
    if not weights:
        target += "-tokenizer"
    wanted = tuple(end for end in MODEL_FILES if weights or end != WEIGHTS)
    there = {
        name: [size, written.isoformat()]
        for name, (size, written) in objects.items()
        if name.endswith(wanted) and "/" not in name
    }
    try:
        with open(os.path.join(target, TAKEN), encoding="utf-8") as file:
            noted: dict[str, list[Any]] = json.load(file)
        taken = {name: mark for name, mark in noted.items() if os.path.getsize(os.path.join(target, name)) == mark[0]}
    except (OSError, ValueError):
        taken = {}
    if taken != there:
        for name in taken.keys() - there.keys():  # gone from the store
            os.remove(os.path.join(target, name))
        for name in there:
            storage.download(name, os.path.join(target, name))
        with tempfile.NamedTemporaryFile("w", dir=target, delete=False, encoding="utf-8") as note:
            json.dump(there, note)
        # Last: a broken download has no note of these sizes and times, and is made again.
        os.replace(note.name, os.path.join(target, TAKEN))
    return target


def build_tokenizer(
    recipe: Recipe, base: str | None, learned: PreTrainedTokenizerBase | None = None
) -> PreTrainedTokenizerBase:
    """Returns a run's tokenizer: the base's, another model's or a learned one, changed by the recipe."""
    spec = recipe.model.tokenizer
    if learned is not None:
        tokenizer = learned
    else:
        folder = local_model(spec.base, store=recipe.store) if spec and spec.base else base
        if folder is None:
            raise UserError("model.tokenizer is missing.", remedy="Give tokenizer: {train: …} or {base: …}.")
        if spec and spec.base:
            user_code.trusted_model(recipe, "model.tokenizer.base", folder)
        tokenizer = load_tokenizer(folder, trust_remote_code=recipe.model.trust_remote_code)
    before = tokenizer.get_vocab()
    if spec:
        vocabulary.change(tokenizer, spec)
    if learned is None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer in {folder!r} has no end-of-sequence token.", remedy="Choose another one.")
        vocabulary.record_new_tokens(tokenizer, before, base_rows(recipe, base) if spec and base else None)
        new = vocabulary.new_ids(tokenizer)
        saved = {name.rpartition(".")[2] for name in (recipe.adapter and recipe.adapter.modules_to_save) or []}
        is_sharded = recipe.world_size > 1 and recipe.parallel.is_sharded
        if new and recipe.adapter and is_sharded and not {"embed_tokens", "lm_head"} <= saved:
            raise UserError(
                f"model.tokenizer: an adapter and the rows of {len(new)} new tokens exclude training.parallel."
                f"strategy {recipe.parallel.strategy}. PEFT replaces rows while it computes, and shards are no whole "
                "embedding.",
                remedy="Use ddp, or train the embeddings in full: adapter.modules_to_save: [embed_tokens, lm_head].",
            )
    if recipe.model.chat_template:
        tokenizer.chat_template = chat.chat_template(recipe.model.chat_template)
    return tokenizer


def tokenizer_identity(recipe: Recipe) -> str | None:
    """Returns the identity of the files of `model.tokenizer.base`."""
    other = recipe.model.tokenizer and recipe.model.tokenizer.base
    return model_identity(local_model(other, store=recipe.store)) if other else None
