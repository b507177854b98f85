"""Model sizes to measure with. A checkpoint of full training by AdamW in fp32 has twelve bytes per parameter."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_PARAMETER = 12
"""Weight and both moments."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama and the batch that it is trained with.

    Attributes:
        batch: Sequences per optimizer step.
        length: Tokens per sequence; rows are packed, so that all steps cost the same.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    length: int = 64

    @property
    def parameters(self) -> int:
        """Number of parameters: attention, feed-forward and norms per block, two embeddings, the last norm."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def bytes(self) -> int:
        """Bytes of a checkpoint, but for some kB."""
        return BYTES_PER_PARAMETER * self.parameters

    @property
    def overrides(self) -> list[str]:
        """What makes the recipe of the benchmark train this model."""
        model = "model.from_scratch"
        return [
            f"{model}.hidden_size={self.hidden}",
            f"{model}.num_hidden_layers={self.layers}",
            f"{model}.num_attention_heads={self.heads}",
            f"{model}.intermediate_size={self.intermediate}",
            f"{model}.vocab_size={self.vocabulary}",
            f"model.tokenizer.train.vocab_size={self.vocabulary}",
            f"data.max_length={self.length}",
            f"training.batch_size={self.batch}",
        ]

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f} M parameters, checkpoints of {self.bytes / 1e6:.0f} MB, "
            f"{self.batch} × {self.length} tokens a step"
        )


SIZES = {
    size.name: size
    for size in (
        Size(name="200k", hidden=64, layers=2, heads=2, intermediate=128, vocabulary=1024, batch=8),
        Size(name="2m", hidden=192, layers=4, heads=4, intermediate=512, vocabulary=1024, batch=16),
        Size(name="8m", hidden=288, layers=6, heads=4, intermediate=768, vocabulary=4096, batch=8),
        Size(name="77m", hidden=768, layers=8, heads=12, intermediate=2816, vocabulary=4096, batch=4),
        Size(name="214m", hidden=1024, layers=16, heads=16, intermediate=2816, vocabulary=4096, batch=2),
    )
}
