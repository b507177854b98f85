"""Estimates a training step's peak memory, item by item: from the recipe and the shapes of its model.

Weights, gradients and optimizer state are counted, activations a formula (`activations`). Of several processes each has
a share of weights, gradients and optimizer where they are in shards, and all of its own micro-batch's activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.components.shared.models import activations, optimizer_state, skeleton
from baton.components.shared.models.activations import Shape
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
OVERHEAD = GIB
"""Bytes for what is always there: on a GPU the CUDA context, cuBLAS and the allocator's remains, else the libraries."""

WORKERS_BUCKETS = 6 * 2**23
"""Bytes of gradients of virtual workers on their way between processes, and of what arrives for them."""


@dataclass(frozen=True)
class Item:
    """Something that takes memory.

    Attributes:
        name: What it is.
        bytes: How much it takes.
        how: How that comes about.
    """

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Estimate:
    """Memory of a training step, item by item.

    Attributes:
        items: All that takes memory at the peak.
        parameters: Weights of the model, its adapter included.
        trainable: Those that are trained.
    """

    items: tuple[Item, ...]
    parameters: int
    trainable: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(item.bytes for item in self.items)


def estimate(recipe: Recipe, model: nn.Module) -> Estimate:
    """Estimates the peak of one device, the only one or one of several.

    Args:
        recipe: The recipe; its micro-batch size must be a number.
        model: Its model as `skeleton.build` lays it out.
    """
    shape = Shape(recipe, model)
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


def _held(shape: Shape) -> list[Item]:
    """Returns what is there throughout, of which shards may lie in the host's memory."""
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
        Item("optimizer", optimizer_state.num_bytes(training, shape.model) // shards, f"{training.optimizer}{of}"),
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
        beside = skeleton.build_second(recipe)
        size = sum(value.numel() * value.element_size() for value in beside.parameters())
        number = sum(value.numel() for value in beside.parameters())
        items.append(Item(second[0], size, f"{_count(number)}, frozen, whole in each process"))
    return items


def _of_workers(recipe: Recipe, gradients: int) -> list[Item]:
    """Returns what virtual workers hold beside the gradients of one.

    A process holds a sum for each level of its tree. A worker of one pass is added to the sum that waits for it weight
    by weight; the gradients of one with several are there until its last.
    """
    fewest = recipe.processes * min(recipe.node_counts)  # they have the most workers each
    levels = (recipe.workers // fewest).bit_length() - 1
    copies = levels if recipe.gradient_accumulation_steps > 1 else max(levels - 1, 0)
    on_their_way = min(2 * gradients, WORKERS_BUCKETS) if recipe.world_size > 1 else 0
    return [
        Item("sums of virtual workers", copies * gradients, f"{copies} x the gradients"),
        Item("gradients on their way", on_their_way, "three buckets, each twice"),
    ]


def _computed_with(shape: Shape) -> Item:
    """Returns what DeepSpeed computes with beside its masters; with stage 2 that is whole."""
    numbers = shape.parameters if shape.offloaded else shape.trainable
    return Item("weights computed with", numbers * shape.compute_bytes // shape.weight_shards, "DeepSpeed's copies")


def _passing(shape: Shape) -> list[Item]:
    """Returns what is there between forward and backward."""
    training = shape.training
    of = f"{shape.sequences} x {shape.length} tokens"
    layers, block = activations.num_layers(shape), shape.tokens * activations.block_bytes(shape)
    if training.activation_offloading:
        num_bytes, how = block, f"{of}, one block's; the others are in the host's memory"
    elif training.gradient_checkpointing:
        num_bytes = block + layers * shape.tokens * shape.weight_bytes * shape.text.hidden_size
        how = f"{of}, inputs of {layers} blocks and all of one"
    else:
        num_bytes, how = layers * block + activations.adapter_inputs(shape), f"{of} in {layers} blocks"
    return [
        Item("activations", int(num_bytes), how),
        Item("gathered weights", *activations.gathered(shape)),
        Item("16-bit weights", activations.copies(shape), f"autocast's copies, {training.precision}"),
        Item("logits", *activations.logits(shape)),
        Item("rows of new tokens", *activations.rows_of_tokens(shape)),
    ]


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
