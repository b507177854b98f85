"""Supervised fine-tuning."""

from baton.components.shared.recipe.methods.spec import MethodSpec

SPEC = MethodSpec(
    name="sft",
    formats=("text", "prompt-completion", "instruction", "messages", "sharegpt", "tool-calls"),
    rows="sequences",
    takes_loss=True,
    counts_tokens=True,
    strategies=("ddp", "fsdp", "zero2", "zero3"),
    offloads_activations=True,
    logged={"entropy": "entropy", "mean_token_accuracy": "token accuracy"},
)
