"""Estimates the bytes of activations between forward and backward: a formula of the model's shape.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198, section 4), with what Transformers keeps today: norms computed in fp32, gated feed-forward layers,
attention that stores no scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.components.shared.models import trainable
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

TILE = (4096, 32768)
"""Tokens and words of the logits that TRL computes at once, where its loss needs no more (`trl/kernels`)."""


class Shape:
    """The numbers that the items are made of."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
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
        self.few_bits = _few_bits(model, self.head) if quantization else set()

    def value_bytes(self, name: str, value: Any) -> float:
        """Returns the bytes in which one number of a parameter is held."""
        spec = self.recipe.model.quantization
        if spec and value.requires_grad:  # QLoRA's own, as TRL casts it
            return 4 if "lora_magnitude_vector" in name else 2
        if spec and id(value) in self.few_bits:
            if spec.bits == 8:
                return 1.0
            # With the constants of each block of 64 (QLoRA, arXiv:2305.14314, section 3).
            return 0.5 + ((1 / 64 + 4 / (64 * 256)) if spec.double else 4 / 64)
        return float(value.element_size())


def _few_bits(model: nn.Module, head: Any) -> set[int]:
    """Returns the ids of the weights that bitsandbytes holds in few bits: of all layers but the last."""
    from torch import nn

    layers = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return {id(layer.weight) for layer in layers if not layer.weight.requires_grad}


def num_layers(shape: Shape) -> int:
    """Returns the blocks that gradients pass: all from the first one that has something trained."""
    blocks = trainable.blocks(shape.model)
    inside = {id(value) for block in blocks for value in block.parameters()}
    before = [name for name, value in shape.values if value.requires_grad and id(value) not in inside]
    first = next((i for i, x in enumerate(blocks) if any(value.requires_grad for value in x.parameters())), len(blocks))
    return int(shape.text.num_hidden_layers) - (0 if any("embed" in name for name in before) else first)


def block_bytes(shape: Shape) -> int:
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


def _attention(shape: Shape, names: set[str]) -> int:
    """Returns the bytes that the attention of one block keeps for each token."""
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


def adapter_inputs(shape: Shape) -> int:
    """Returns what an adapter's layers keep of their own: their input, and where dropout left it."""
    adapter = shape.recipe.adapter
    if adapter is None:
        return 0
    width = sum(value.shape[-1] for name, value in shape.values if ".lora_A." in name)
    return int(shape.tokens * width * (shape.compute_bytes + (4 if adapter.dropout else 0)))


def gathered(shape: Shape) -> tuple[int, str]:
    """Returns the bytes of weights that are brought together from shards to compute with, and which those are."""
    if shape.weight_shards == 1:
        return 0, ""
    blocks = trainable.blocks(shape.model)
    block = max((sum(value.numel() for value in block.parameters()) for block in blocks), default=shape.parameters)
    learned = max((sum(x.numel() for x in b.parameters() if x.requires_grad) for b in blocks), default=shape.trainable)
    head = shape.head.weight.numel() if shape.head is not None and blocks else 0
    together = (2 * block + head + learned) * shape.compute_bytes
    return together, "a block and the next one, the head, and one block's gradients"


def copies(shape: Shape) -> int:
    """Returns the bytes of autocast's copies of weights in fp32; those of frozen ones go with each block.

    Shards are brought together in 16 bits, and need no copies.
    """
    if not shape.mixed or shape.weight_bytes == 2 or shape.shards > 1:
        return 0
    keeps_frozen = not shape.training.gradient_checkpointing
    weights = (x for name, x in shape.values if x.dim() > 1 and "embed" not in name and id(x) not in shape.few_bits)
    return sum(2 * value.numel() for value in weights if value.requires_grad or keeps_frozen)


def rows_of_tokens(shape: Shape) -> tuple[int, str]:
    """Returns the bytes that rows of new tokens take beside an adapter, and how they come about.

    PEFT puts such rows into copies of the whole layer in each forward pass, and the gradient is one of all rows.
    """
    spec, adapter = shape.recipe.model.tokenizer, shape.recipe.adapter
    saved = {name.rpartition(".")[2] for name in (adapter and adapter.modules_to_save) or []}
    if adapter is None or spec is None or not spec.adds or {"embed_tokens", "lm_head"} <= saved:
        return 0, ""
    size = shape.text.vocab_size * shape.text.hidden_size
    return size * (2 * shape.weight_bytes + 4), "PEFT's copies of a layer, and its gradient"


def logits(shape: Shape) -> tuple[int, str]:
    """Returns the bytes of logits and their gradient, and how they come about."""
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
