"""Estimates a training step's peak memory, item by item, from the recipe and its model's shapes.

Weights, gradients and optimizer state are counted on torch's meta device. Activations are a formula after Korthikanti
et al. (arXiv:2205.05198, section 4), with Transformers' fp32 norms, gated feed-forward layers and lean attention.
Each process counts its shard of sharded state, and all of its own micro-batch's activations.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.errors import UserError
from baton.models import gguf_file, loading, trainable
from baton.recipe.model import NamedModel, Tokenizer
from baton.recipe.recipe import Recipe
from baton.recipe.training import Training
from baton.scratch import scratch_folder
from baton.store.storage import Storage

if TYPE_CHECKING:
    from torch import nn


HUB_TIMEOUT = 10  # seconds
GIB = 2**30
OVERHEAD = GIB  # bytes: on a GPU the CUDA context, cuBLAS and the allocator's remains, else the libraries
WORKERS_BUCKETS = 6 * 2**23  # bytes of virtual workers' gradients sent and received between processes
FLOAT = 4  # bytes of an fp32 number
BITSANDBYTES = {"adam": 2, "lion": 1, "ademamix": 3}  # values per weight in bitsandbytes' states
BLOCK = 256  # values with a common fp32 constant in their 8-bit states (Dettmers et al., arXiv:2110.02861)
SMALL = 4096  # values below which their state of a tensor stays in 32 bits
TILE = (4096, 32768)  # tokens and words of logits that TRL computes at once, where its loss allows (`trl/kernels`)


@dataclass(frozen=True)
class Item:
    name: str
    bytes: int  # at the peak
    how: str


@dataclass(frozen=True)
class Estimate:
    items: tuple[Item, ...]
    parameters: int  # the adapter's included
    trainable: int

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)


def build_skeleton(recipe: Recipe) -> nn.Module:
    """Returns the model to train on torch's meta device, frozen and adapted as in training."""
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
            if recipe.adapter:
                from peft import get_peft_model

                plain = recipe.adapter.model_copy(update={"init": "default"})  # the others compute with the weights
                settings = trainable.lora(recipe.model_copy(update={"adapter": plain}))
                model = get_peft_model(model, settings, low_cpu_mem_usage=True)
            # With autocast, Accelerate holds trained shards in fp32.
            if recipe.world_size > 1 and recipe.parallel.is_sharded and recipe.training.precision in ("bf16", "fp16"):
                for value in model.parameters():
                    if value.requires_grad:
                        value.data = value.data.float()
            return model
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


def build_second_skeleton(recipe: Recipe) -> nn.Module:
    """Returns the method's second model on torch's meta device."""
    assert recipe.training.second_model
    _, named = recipe.training.second_model
    try:
        return _second(named, named.dtype or recipe.model.dtype)
    except Exception as error:  # of the hub, the store or the configuration
        raise UserError(
            f"the configuration of model {named.base!r} cannot be read: {type(error).__name__}: {_short(error)}"
        ) from None


def configuration(recipe: Recipe) -> Any:
    """Returns the Transformers configuration of the recipe's model."""
    spec = recipe.model
    try:
        if spec.from_scratch:
            config = loading.scratch_config(spec.from_scratch, None, recipe.data.max_length)
            config.vocab_size = max(spec.from_scratch.vocab_size or 0, _num_tokens(spec.tokenizer))
            config.pad_token_id = None
        else:
            config = _of_base(spec.base or "", spec.revision, spec.trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # of the hub, the store or the configuration
        of_tokenizer = spec.tokenizer.base if spec.from_scratch and spec.tokenizer else None
        what = f"tokenizer {of_tokenizer!r}" if of_tokenizer else f"the configuration of model {spec.base!r}"
        raise UserError(f"{what} cannot be read: {type(error).__name__}: {_short(error)}") from None
    if recipe.training.spec.scores:
        config.num_labels = 1
    return config


def _of_base(base: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if found := gguf_file.find(base, revision):
        return gguf_file.configuration(found)
    if os.path.isdir(base):
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    if "://" not in base:
        import huggingface_hub

        here = isinstance(huggingface_hub.try_to_load_from_cache(base, "config.json", revision=revision), str)
        if not here:  # one request first, as fetching tries for half a minute
            huggingface_hub.HfApi().model_info(base, revision=revision, timeout=HUB_TIMEOUT)
        return AutoConfig.from_pretrained(
            base, revision=revision, local_files_only=here, trust_remote_code=trust_remote_code
        )
    with scratch_folder("config") as folder:
        with open(os.path.join(folder, "config.json"), "wb") as file:
            file.write(Storage(base).read("config.json"))
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)  # its code is not here


def _num_tokens(tokenizer: Tokenizer | None) -> int:
    assert tokenizer
    if tokenizer.train:
        return tokenizer.train.vocab_size  # training may end on fewer
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(tokenizer.base, trust_remote_code=False))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def optimizer_bytes(training: Training, model: nn.Module) -> int:
    """Returns the bytes of the optimizer's state."""
    from torch import nn

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(
        _of_tensor(training, value, is_embedding=id(value) in embeddings)
        for value in model.parameters()
        if value.requires_grad
    )


def _of_tensor(training: Training, value: Any, *, is_embedding: bool) -> int:
    name = training.optimizer
    bytes_each = next((bytes_each for part, bytes_each in BITSANDBYTES.items() if part in name), 0)
    if name == "adafactor":  # second moments of rows and columns where there are any (arXiv:1804.04235)
        shape = tuple(value.shape)
        values = math.prod(shape[:-2]) * (shape[-2] + shape[-1]) if len(shape) > 1 else math.prod(shape)
        return int((values + 1) * FLOAT)  # and the root mean square of the weights
    if name in ("adamw_torch", "adamw_torch_fused"):
        return int(2 * value.numel() * value.element_size() + FLOAT)  # two moments, and the step as a number
    if name in ("sgd", "rmsprop", "adagrad"):
        options = training.optimizer_options
        momentum = float(options.get("momentum", 0)) != 0
        if training.optimizer == "sgd":
            return int(momentum * value.numel() * value.element_size())
        centered = str(options.get("centered", False)).lower() in ("true", "1", "yes")
        num_values = 1 + (momentum + centered if training.optimizer == "rmsprop" else 0)
        return int(num_values * value.numel() * value.element_size() + FLOAT)
    if name.endswith("8bit") and value.numel() >= SMALL and not is_embedding:
        return int(bytes_each * (value.numel() + -(-value.numel() // BLOCK) * FLOAT))
    return int(bytes_each * value.numel() * FLOAT)


class StepShape:
    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        from torch import nn

        text: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
        training, quantization = recipe.training, recipe.model.quantization
        self.recipe, self.training, self.model, self.text = recipe, training, model, text
        self.on_gpu = recipe.resources.gpus > 0
        self.shards = recipe.world_size if recipe.parallel.is_sharded else 1
        self.weight_shards = self.shards if recipe.parallel.splits_weights else 1
        self.offloaded = self.shards > 1 and recipe.parallel.offload == "cpu"
        self.of_shards = f", 1 of {self.shards} shards" if self.shards > 1 else ""
        self.values = list(model.named_parameters())
        self.parameters = sum(value.numel() for _, value in self.values)
        self.trainable = sum(value.numel() for _, value in self.values if value.requires_grad)
        self.mixed = training.precision in ("bf16", "fp16")
        self.weight_bytes = 4 if recipe.model.dtype == "float32" else 2
        self.compute_bytes = 2 if self.mixed else self.weight_bytes
        writes = training.completions.max_completion_length if training.completions else 0
        self.length = recipe.data.max_length + writes
        self.sequences = recipe.micro_batch_size_per_process * training.spec.sequences_per_row
        self.tokens = self.sequences * self.length
        self.head: Any = model.get_output_embeddings()  # type: ignore[operator]
        # Ids of the weights that bitsandbytes holds in few bits: of all linear layers but the last.
        self.few_bits = {
            id(layer.weight)
            for layer in (model.modules() if quantization else ())
            if isinstance(layer, nn.Linear) and layer is not self.head and not layer.weight.requires_grad
        }

    def value_bytes(self, name: str, value: Any) -> float:
        spec = self.recipe.model.quantization
        if spec and value.requires_grad:  # QLoRA's own, as TRL casts it
            return 4 if "lora_magnitude_vector" in name else 2
        if spec and id(value) in self.few_bits:
            if spec.bits == 8:
                return 1.0
            # With the constants of each block of 64 (QLoRA, arXiv:2305.14314, section 3).
            return 0.5 + ((1 / 64 + 4 / (64 * 256)) if spec.double else 4 / 64)
        return float(value.element_size())


def num_layers(shape: StepShape) -> int:
    """Returns the number of blocks that gradients pass: all from the first with something trained."""
    blocks = trainable.blocks(shape.model)
    inside = {id(value) for block in blocks for value in block.parameters()}
    before = [name for name, value in shape.values if value.requires_grad and id(value) not in inside]
    first = next((i for i, x in enumerate(blocks) if any(value.requires_grad for value in x.parameters())), len(blocks))
    return int(shape.text.num_hidden_layers) - (0 if any("embed" in name for name in before) else first)


def block_bytes(shape: StepShape) -> int:
    """Returns the bytes that one block keeps for each token."""
    text, compute = shape.text, shape.compute_bytes
    hidden, names = text.hidden_size, {name for name, _ in shape.values}
    # A norm keeps its input in fp32 and what it normalised; its output is the next layer's input.
    norms = 2 * (4 + shape.weight_bytes + compute) * hidden
    experts = getattr(text, "num_experts_per_tok", None) or 1
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * hidden
    num_values = 4 if any("gate" in name for name in names) else 2
    if "gelu_new" in (getattr(text, "activation_function", ""), getattr(text, "hidden_act", "")):
        num_values = 5  # each term of the formula
    dropped = 2 * hidden if _rate(text, "resid_pdrop", "hidden_dropout") else 0
    masks = dropped * (1 if shape.on_gpu else compute)
    return int(norms + _attention(shape, names) + num_values * experts * inner * compute + masks)


def _attention(shape: StepShape, names: set[str]) -> int:
    text, compute = shape.text, shape.compute_bytes
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    num_bytes = 5 * heads * size * compute  # queries, keys, values, what comes out, and that brought into order
    if any("q_norm" in name for name in names):
        groups = getattr(text, "num_key_value_heads", None) or heads
        num_bytes += (4 + shape.weight_bytes) * (heads + groups) * size
    drops = _rate(text, "attention_dropout", "attn_pdrop")
    if shape.recipe.model.attention == "eager" or (drops and not shape.on_gpu):  # torch's own needs CUDA to drop
        scores = 4 if compute == 4 else 4 + compute  # after the softmax: in fp32, and as they are used
        num_bytes += (scores + (2 * compute if drops else 0)) * heads * shape.length
    return int(num_bytes)


def _rate(text: Any, *names: str) -> float:
    return max(float(getattr(text, name, None) or 0) for name in names)


def adapter_inputs(shape: StepShape) -> int:
    """Returns the bytes of an adapter's own: its layers' inputs, and those after dropout."""
    adapter = shape.recipe.adapter
    if adapter is None:
        return 0
    width = sum(value.shape[-1] for name, value in shape.values if ".lora_A." in name)
    return int(shape.tokens * width * (shape.compute_bytes + (4 if adapter.dropout else 0)))


def gathered_bytes(shape: StepShape) -> tuple[int, str]:
    """Returns the bytes of weights that are gathered from shards to compute with, and which in words."""
    if shape.weight_shards == 1:
        return 0, ""
    blocks = trainable.blocks(shape.model)
    block = max((sum(value.numel() for value in block.parameters()) for block in blocks), default=shape.parameters)
    learned = max((sum(x.numel() for x in b.parameters() if x.requires_grad) for b in blocks), default=shape.trainable)
    head = shape.head.weight.numel() if shape.head is not None and blocks else 0
    together = (2 * block + head + learned) * shape.compute_bytes
    return together, "a block and the next one, the head, and one block's gradients"


def autocast_bytes(shape: StepShape) -> int:
    """Returns the bytes of autocast's copies of fp32 weights; copies of frozen ones go with each block."""
    if not shape.mixed or shape.weight_bytes == 2 or shape.shards > 1:  # shards are gathered in 16 bits
        return 0
    keeps_frozen = not shape.training.gradient_checkpointing
    weights = (x for name, x in shape.values if x.dim() > 1 and "embed" not in name and id(x) not in shape.few_bits)
    return sum(2 * value.numel() for value in weights if value.requires_grad or keeps_frozen)


def token_row_bytes(shape: StepShape) -> tuple[int, str]:
    """Returns the bytes of new tokens' rows with an adapter, and their origin in words."""
    spec, adapter = shape.recipe.model.tokenizer, shape.recipe.adapter
    saved = {name.rpartition(".")[2] for name in (adapter and adapter.modules_to_save) or []}
    if adapter is None or spec is None or not spec.adds or {"embed_tokens", "lm_head"} <= saved:
        return 0, ""
    # PEFT puts such rows into copies of the whole layer in each forward pass, and the gradient is one of all rows.
    size = shape.text.vocab_size * shape.text.hidden_size
    return size * (2 * shape.weight_bytes + 4), "PEFT's copies of a layer, and its gradient"


def logits_bytes(shape: StepShape) -> tuple[int, str]:
    """Returns the bytes of logits and their gradient, and their origin in words."""
    spec, vocabulary, hidden = shape.training.spec, shape.text.vocab_size, shape.text.hidden_size
    if spec.scores:
        return 0, "one score per answer"
    if not spec.tiles_logits or shape.recipe.hooks.loss:
        rows = 3 * 4 + (shape.compute_bytes if shape.compute_bytes < 4 else 0)
        return shape.tokens * vocabulary * rows, f"{shape.tokens} x {vocabulary} in fp32, thrice"
    tokens, words = min(shape.tokens, TILE[0]), min(vocabulary, TILE[1])
    tile = tokens * TILE[1] * shape.compute_bytes + (0 if shape.on_gpu else 5 * 4 * tokens * words)
    learned = shape.head is not None and shape.head.weight.requires_grad
    gradients = 4 * shape.tokens * hidden + (4 * vocabulary * hidden if learned else 0)
    return tile + gradients, f"{vocabulary} words, in tiles, and gradients in fp32"


def estimate(recipe: Recipe, model: nn.Module) -> Estimate:
    """Estimates one device's peak for a model of `build_skeleton` and a known micro-batch size."""
    shape = StepShape(recipe, model)
    held, passing = _held(shape), _passing(shape)
    # Other moments than forward and backward: the optimizer's step, and writing.
    training, text = shape.training, shape.text
    steps_here = shape.on_gpu and not shape.offloaded and training.optimizer == "adamw_torch"
    step = 4 * shape.trainable // shape.shards if steps_here else 0
    moments = [("optimizer's step", step, "temporaries as large as the weights trained")]
    if training.completions:
        rows = training.round_size // shape.recipe.world_size
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        cache = 2 * rows * shape.length * text.num_hidden_layers * width * shape.compute_bytes
        moments.append(("completions", int(cache), f"keys and values of {rows} being written"))
    moment, size, how = max(moments, key=lambda entry: entry[1])
    beyond = size - sum(item.bytes for item in passing)
    more = [Item(moment, beyond, f"{how}, beyond what activations leave")] if beyond > 0 else []
    overhead = Item("fixed", OVERHEAD, "CUDA, its libraries and allocator" if shape.on_gpu else "torch and libraries")
    items = tuple(item for item in (*held, *passing, *more, overhead) if item.bytes)
    return Estimate(items, shape.parameters, shape.trainable)


def _held(shape: StepShape) -> list[Item]:  # throughout the step; shards may be in the host's memory
    recipe, training, shards, of = shape.recipe, shape.training, shape.shards, shape.of_shards
    if shape.offloaded:
        return [_computed_with(shape)] if recipe.parallel.strategy == "zero2" else []
    spec = recipe.model.quantization
    frozen = sum(x.numel() * shape.value_bytes(name, x) for name, x in shape.values if not x.requires_grad)
    learned = sum(x.numel() * shape.value_bytes(name, x) for name, x in shape.values if x.requires_grad)
    kind = f"{spec.bits} bits, the rest in {recipe.model.dtype}" if spec else recipe.model.dtype
    kind += of if shape.weight_shards > 1 else ""
    whose = "the adapter's" if recipe.adapter else f"in {recipe.model.dtype}"
    items = [
        Item(
            "weights",
            int(frozen) // shape.weight_shards,
            f"{_count(shape.parameters - shape.trainable)}, frozen, in {kind}",
        ),
        Item("trained weights", int(learned) // shards, f"{_count(shape.trainable)}, {whose}{of}"),
        Item("gradients", int(learned) // shards, f"as the weights trained{of}"),
        Item("optimizer", optimizer_bytes(training, shape.model) // shards, f"{training.optimizer}{of}"),
    ]
    if shards > 1 and recipe.parallel.is_zero:
        items.append(_computed_with(shape))
    if recipe.parallel.virtual_workers:
        items += _of_workers(recipe, int(learned))
    elif recipe.world_size > shards:
        items.append(Item("gradients on their way", int(learned), "DDP's buckets, as the gradients"))
    if recipe.training.has_reference(adapter=recipe.adapter is not None):
        size = sum(value.numel() * value.element_size() for _, value in shape.values) // shards
        items.append(Item("reference", size, f"the start model once more, in {recipe.model.dtype}{of}"))
    if second := recipe.training.second_model:
        beside = build_second_skeleton(recipe)
        size = sum(value.numel() * value.element_size() for value in beside.parameters())
        number = sum(value.numel() for value in beside.parameters())
        items.append(Item(second[0], size, f"{_count(number)}, frozen, whole in each process"))
    return items


def _of_workers(recipe: Recipe, gradients: int) -> list[Item]:
    # A process holds a sum for each level of its tree. A worker of one pass is added weight by weight to the waiting
    # sum; gradients of a worker with several passes are there until its last.
    fewest = recipe.processes * min(recipe.node_counts)  # they have the most workers each
    levels = (recipe.workers // fewest).bit_length() - 1
    copies = levels if recipe.gradient_accumulation_steps > 1 else max(levels - 1, 0)
    on_their_way = min(2 * gradients, WORKERS_BUCKETS) if recipe.world_size > 1 else 0
    return [
        Item("sums of virtual workers", copies * gradients, f"{copies} x the gradients"),
        Item("gradients on their way", on_their_way, "three buckets, each twice"),
    ]


def _computed_with(shape: StepShape) -> Item:
    """Returns DeepSpeed's weights in addition to its masters; with stage 2 they are whole."""
    numbers = shape.parameters if shape.offloaded else shape.trainable
    return Item("weights computed with", numbers * shape.compute_bytes // shape.weight_shards, "DeepSpeed's copies")


def _passing(shape: StepShape) -> list[Item]:  # between forward and backward
    training = shape.training
    of = f"{shape.sequences} x {shape.length} tokens"
    layers, block = num_layers(shape), shape.tokens * block_bytes(shape)
    if training.activation_offloading:
        num_bytes, how = block, f"{of}, one block's; the others are in the host's memory"
    elif training.gradient_checkpointing:
        num_bytes = block + layers * shape.tokens * shape.weight_bytes * shape.text.hidden_size
        how = f"{of}, inputs of {layers} blocks and all of one"
    else:
        num_bytes, how = layers * block + adapter_inputs(shape), f"{of} in {layers} blocks"
    return [
        Item("activations", int(num_bytes), how),
        Item("gathered weights", *gathered_bytes(shape)),
        Item("16-bit weights", autocast_bytes(shape), f"autocast's copies, {training.precision}"),
        Item("logits", *logits_bytes(shape)),
        Item("rows of new tokens", *token_row_bytes(shape)),
    ]


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
