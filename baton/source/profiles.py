"""Hardware profiles: values that a kind of machine chooses where a recipe leaves them open."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton import machine
from baton.errors import UserError
from baton.recipe.recipe import Recipe

Document = dict[str, Any]

SMALL = 30 * 2**30
"""Bytes of memory up to which a GPU counts as small: 24 GB cards below, 40 GB cards above."""


@dataclass(frozen=True)
class Choice:
    """A value that a profile set at a dotted path, with the reason in a few words."""

    path: str
    value: str | int | bool
    reason: str


def apply(document: Document, *, here: bool = True) -> tuple[Document, list[Choice]]:
    """Returns a recipe, not checked yet, with its profile's choices, and these; a key that is there, even null, stays.

    `here` tells whether the recipe runs on this machine, so that `auto` can look at it. A second call chooses nothing.
    """
    document, chosen = copy.deepcopy(document), []
    resources = document.get("resources")
    profile = resources.get("profile") if isinstance(resources, dict) else None
    if profile == "auto":
        profile, reason = _of_this_machine(here)
        document["resources"]["profile"] = profile
        chosen.append(Choice("resources.profile", profile, reason))
    if not isinstance(profile, str) or profile not in PROFILES:
        return document, chosen  # none, or a mistake that the schema reports
    for choice in PROFILES[profile](_trains_adapters_only(document)):
        section, _, key = choice.path.partition(".")
        if document.get(section) is None:
            document[section] = {}
        if isinstance(document[section], dict) and key not in document[section]:
            document[section][key] = choice.value
            chosen.append(choice)
    return document, chosen


def explained(recipe: Recipe, chosen: Sequence[Choice]) -> Iterator[str]:
    """Yields lines with a profile's choices and their reasons."""
    if recipe.resources.profile is None:
        return
    yield f"profile {recipe.resources.profile} chose{':' if chosen else ' nothing: the recipe says it all'}"
    width = max((len(f"{choice.path}: {choice.value}") for choice in chosen), default=0)
    for choice in chosen:
        value = str(choice.value).lower() if isinstance(choice.value, bool) else choice.value
        yield f"  {f'{choice.path}: {value}':<{width}}  {choice.reason}"


def _of_this_machine(here: bool) -> tuple[str, str]:
    if not here:
        raise UserError(
            "resources.profile is auto, which looks at the machine it runs on; a cluster's nodes are not this one.",
            remedy=f"Name one of {', '.join(PROFILES)}, for example --set resources.profile=cuda-large.",
        )
    if gpu := machine.gpu():
        size = "cuda-small" if gpu.bytes <= SMALL else "cuda-large"
        return size, f"this machine has {gpu.name} with {gpu.bytes / 2**30:.0f} GiB"
    if machine.has_mps():
        return "mps", "this machine has Apple's GPU"
    return "cpu", "this machine has no GPU that torch can use"


def _trains_adapters_only(document: Document) -> bool:
    """Tells whether the base's weights stay frozen, in the one training or in each phase."""
    phases = document.get("phases")
    parts = phases if isinstance(phases, list) and phases else [{}]
    own = [part.get("adapter", {}) if isinstance(part, dict) else {} for part in parts]
    return all(adapter is not None and (adapter or document.get("adapter")) for adapter in own)


def _cpu(adapted: bool) -> Iterator[Choice]:
    yield Choice("training.precision", "fp32", "most CPUs only imitate 16 bits")
    yield Choice("training.gradient_checkpointing", False, "a CPU is short of time rather than of memory")
    yield Choice("training.optimizer", "adamw_torch", "needs nothing but torch")
    yield Choice("training.workers", 0, "processes that prepare batches would take cores from training")
    yield Choice("model.dtype", "float32", "as the arithmetic")
    yield Choice("model.attention", "sdpa", "torch's own, memory linear in the length")
    yield Choice("resources.gpus", 0, "no accelerator")
    yield Choice("resources.cpu", "4", "room for torch's threads")
    yield Choice("resources.memory", "16Gi", "small models, and a checkpoint on its way beside them")
    yield Choice("resources.shm", "2Gi", "checkpoints are staged in memory")


def _mps(adapted: bool) -> Iterator[Choice]:
    yield Choice("training.precision", "fp32", "autocast on MPS is young, and its GPU gains little by 16 bits")
    yield Choice("training.gradient_checkpointing", True, "the GPU shares its memory with everything else")
    yield Choice("training.optimizer", "adamw_torch", "the fused kernels are CUDA's")
    yield Choice("training.workers", 0, "macOS starts a worker by importing everything anew")
    yield Choice("model.dtype", "float32", "as the arithmetic")
    yield Choice("model.attention", "sdpa", "torch's own; the others need CUDA")
    yield Choice("resources.gpus", 0, "MPS is no resource of Kubernetes")


def _cuda_small(adapted: bool) -> Iterator[Choice]:
    yield Choice("training.gradient_checkpointing", True, "activations of one block at a time, a third more time")
    if adapted:
        yield Choice("training.optimizer", "adamw_torch_fused", "an adapter's moments are small; one kernel a step")
    else:
        yield Choice("training.optimizer", "paged_adamw_8bit", "2 bytes a weight instead of 8; needs bitsandbytes")
    yield Choice("training.workers", 2, "batches are ready when the GPU is")
    yield from _cuda(adapted)
    yield Choice("resources.cpu", "4", "training, two workers and the upload of checkpoints")
    yield Choice("resources.memory", "32Gi", "what nodes with one small GPU have, less the system's share")
    yield Choice("resources.shm", "8Gi", "checkpoints are staged in memory")


def _cuda_large(adapted: bool) -> Iterator[Choice]:
    yield Choice("training.gradient_checkpointing", False, "there is memory for the activations")
    yield Choice("training.optimizer", "adamw_torch_fused", "exact moments, one kernel a step")
    yield Choice("training.workers", 4, "batches are ready when the GPU is")
    yield from _cuda(adapted)
    yield Choice("resources.cpu", "8", "training, four workers and the upload of checkpoints")
    yield Choice("resources.memory", "96Gi", "the model once more, and a checkpoint on its way")
    yield Choice("resources.shm", "32Gi", "checkpoints are staged in memory")


def _cuda(adapted: bool) -> Iterator[Choice]:
    yield Choice("training.precision", "bf16", "tensor cores, half the activations, and no loss scale to keep")
    if adapted:
        yield Choice("model.dtype", "bfloat16", "the base is frozen: nothing is lost by rounding it once")
    else:
        yield Choice("model.dtype", "float32", "small updates are lost on weights of 16 bits")
    yield Choice("model.attention", "sdpa", "memory linear in the length, and kernels that are deterministic")
    yield Choice("resources.gpus", 1, "one GPU a pod")


PROFILES = {"cpu": _cpu, "mps": _mps, "cuda-small": _cuda_small, "cuda-large": _cuda_large}
"""Profile → its choices, given whether only adapters are trained."""
