"""What both trainers say in much the same way: adapters, precision, quantization and the optimizer's numbers."""

from __future__ import annotations

from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import choice, flag, is_on, number, read, whole

MODE = choice(("default", "reduce-overhead", "max-autotune"), {}, "no such mode; training.compile says which is used")
WITHOUT_ADAPTER = "weights in few bits cannot be trained: add adapter, or leave them whole"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Type by the arithmetic of that name."""


def lora(draft: Draft, kind_key: str, rank_key: str, *, alpha: int | None, rate: float) -> None:
    """Sets an adapter, and LoRA+ as a group of parameters: the second matrix learns faster.

    `alpha`, None for twice the rank, and the learning rate are those of a file that leaves them out.
    """
    rank = read(draft, rank_key, whole, 8)
    draft.put("adapter.type", "lora", kind_key)
    draft.put("adapter.r", rank, rank_key)
    draft.put("adapter.alpha", read(draft, "lora_alpha", whole, alpha or 2 * rank), "lora_alpha")
    ratio = read(draft, "loraplus_lr_ratio", number)
    if ratio:
        faster = float(f"{read(draft, 'learning_rate', number, rate) * ratio:.12g}")
        group = {"name": "loraplus", "pattern": r"\.lora_B\.", "learning_rate": faster}
        draft.put("training.groups", [group], "loraplus_lr_ratio")
    if draft.has("loraplus_lr_embedding"):
        first = "put {pattern: lora_embedding, learning_rate: …} first in training.groups"
        draft.left("loraplus_lr_embedding", f"for adapters on embeddings: {first}")


def precision(draft: Draft, wanted: str, *keys: str) -> None:
    """Sets the arithmetic to `bf16` or `fp16`, and rounding to TF32 where that is asked for."""
    if wanted != "fp32":
        draft.put("training.precision", wanted, *keys)
    draft.carry("training.precision", *keys)
    if is_on(draft, "tf32"):
        draft.put(*(("training.precision", "tf32") if wanted == "fp32" else ("training.tf32", True)), "tf32")
    elif draft.given.get("tf32") is False and draft.has("torch_compile"):  # which would turn it on
        draft.put("training.tf32", False, "tf32")
    else:
        draft.carry("training.precision", "tf32")


def quantization(draft: Draft, bits: int | None, *keys: str) -> bool:
    """Sets the bits per weight, and tells whether they are 4, for which there are further settings."""
    if bits is None or draft.look("adapter") is None:
        for key in keys:
            draft.drop(key, WITHOUT_ADAPTER) if bits else draft.rest(key)
        return False
    draft.put("model.quantization.bits", bits, *keys)
    if bits == 4:
        computing = DTYPES.get(draft.look("training.precision", "fp32"), "float32")
        draft.put("model.quantization.compute_dtype", computing)
    return bits == 4


def betas(draft: Draft) -> None:
    """Sets Adam's decay rates."""
    usual = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    if any(map(draft.has, usual)):
        draft.put("training.adam_betas", [read(draft, key, number, beta) for key, beta in usual.items()], *usual)


def compilation(draft: Draft) -> None:
    """Sets `training.compile` from whether to and the mode."""
    key, mode = "torch_compile", "torch_compile_mode"
    if draft.has(key) and (draft.get(key) == "auto" or read(draft, key, flag)):
        draft.put("training.compile", read(draft, mode, MODE, True), key, mode)
    elif draft.has(mode):
        draft.needless(mode, "has no effect without torch_compile")
    draft.rest(key)
