"""What both trainers say in much the same way: precision, quantization, adapters' start and groups of parameters."""

from __future__ import annotations

from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import choice, flag, number, read

MODE = choice(("default", "reduce-overhead", "max-autotune"), {}, "no such mode; training.compile says which is used")
WITHOUT_ADAPTER = "weights in few bits cannot be trained: add adapter, or leave them whole"


def precision(draft: Draft, wanted: str, *keys: str) -> None:
    """Sets the arithmetic: `bf16`, `fp16`, or `fp32` with `tf32` where that is asked for.

    Args:
        draft: The recipe in the making.
        wanted: What the file comes to, tf32 aside.
        keys: The keys that say so.
    """
    if wanted != "fp32":
        draft.put("training.precision", wanted, *keys)
    draft.carry("training.precision", *keys)
    if not draft.has("tf32") or not read(draft, "tf32", flag):
        draft.carry("training.precision", "tf32")
    elif wanted == "fp32":
        draft.put("training.precision", "tf32", "tf32")
    else:
        draft.left("tf32", f"Baton takes one of both, and {wanted} is given; what stays in 32 bits is not rounded")


def quantization(draft: Draft, bits: int | None, *keys: str) -> bool:
    """Sets the bits per weight, and tells whether there are few."""
    if bits is None:
        for key in keys:
            draft.rest(key)
        return False
    if draft.look("adapter") is None:
        for key in keys:
            if draft.has(key):
                draft.left(key, WITHOUT_ADAPTER)
        return False
    draft.put("model.quantization.bits", bits, *keys)
    computing = {"fp16": "float16", "bf16": "bfloat16"}.get(draft.look("training.precision", "fp32"), "float32")
    if bits == 4:
        draft.put("model.quantization.compute_dtype", computing)
    return True


def loraplus(draft: Draft, rate: float) -> None:
    """Sets LoRA+ as a group of parameters: the second matrix learns faster.

    Args:
        draft: The recipe in the making.
        rate: The learning rate of the others.
    """
    ratio = read(draft, "loraplus_lr_ratio", number)
    if ratio and draft.look("adapter") is not None:
        group = {"name": "loraplus", "pattern": r"\.lora_B\.", "learning_rate": float(f"{rate * ratio:.12g}")}
        draft.put("training.groups", [*draft.look("training.groups", []), group], "loraplus_lr_ratio")
    if draft.has("loraplus_lr_embedding"):
        draft.left(
            "loraplus_lr_embedding",
            "for adapters on embeddings: put {pattern: lora_embedding, learning_rate: …} first in training.groups",
        )


def betas(draft: Draft) -> None:
    """Sets Adam's decay rates."""
    keys = ("adam_beta1", "adam_beta2")
    if any(draft.has(key) for key in keys):
        usual = zip(keys, (0.9, 0.999), strict=True)
        draft.put("training.adam_betas", [read(draft, key, number, beta) for key, beta in usual], *keys)


def compilation(draft: Draft) -> None:
    """Sets `training.compile` from whether to and the mode."""
    keys = ("torch_compile", "torch_compile_mode")
    if draft.has(keys[0]) and (draft.get(keys[0]) == "auto" or read(draft, keys[0], flag)):
        draft.put("training.compile", read(draft, keys[1], MODE, True), *keys)
    elif draft.has("torch_compile_mode"):
        draft.needless("torch_compile_mode", "has no effect without torch_compile")
    draft.rest("torch_compile")
