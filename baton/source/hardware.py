"""Hardware: a machine's choices for settings that a recipe omits, and whether training fits its memory."""

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from baton import machine
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.base import amount
from baton.recipe.cluster import Resources
from baton.recipe.recipe import Recipe
from baton.recipe.search import PREVIOUS

if TYPE_CHECKING:
    from baton.models.memory import Estimate


Document = dict[str, Any]

SMALL = 30 * 2**30
"""Bytes of memory up to which a GPU counts as small: 24 GB cards below, 40 GB cards above."""


@dataclass(frozen=True)
class Choice:
    """A value that a profile set at a dotted path, with the reason in a few words."""

    path: str
    value: str | int | bool
    reason: str


def apply_profile(document: Document, *, here: bool = True) -> tuple[Document, list[Choice]]:
    """Returns a recipe, not checked yet, with its profile's choices, and these; a key that is there, even null, stays.

    The profile `auto` follows this machine if the recipe runs `here`, else `resources`. A second call chooses nothing.
    """
    document, chosen = copy.deepcopy(document), []
    resources = document.get("resources")
    profile = resources.get("profile") if isinstance(resources, dict) else None
    if profile == "auto":
        profile, reason = _of_this_machine() if here else _of_pods(document["resources"])
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


def explain_profile(recipe: Recipe, chosen: Sequence[Choice]) -> Iterator[str]:
    """Yields lines with a profile's choices and their reasons."""
    if recipe.resources.profile is None:
        return
    yield f"profile {recipe.resources.profile} chose{':' if chosen else ' nothing: the recipe sets it all'}"
    width = max((len(f"{choice.path}: {choice.value}") for choice in chosen), default=0)
    for choice in chosen:
        value = str(choice.value).lower() if isinstance(choice.value, bool) else choice.value
        yield f"  {f'{choice.path}: {value}':<{width}}  {choice.reason}"


def _of_pods(resources: Document) -> tuple[str, str]:
    if not resources.get("gpus"):
        return "cpu", "pods ask for no GPU (resources.gpus)"
    known = {key: resources[key] for key in ("gpus", "gpu_memory", "node_selector") if key in resources}
    with contextlib.suppress(ValueError):  # the schema reports it
        if gpu := device(Resources.model_validate(known)):
            size = "cuda-small" if gpu.bytes <= SMALL else "cuda-large"
            return size, f"a GPU of {gpu.bytes / 2**30:.0f} GiB ({gpu.source})"
    return "cuda-small", "fits any GPU; set resources.gpu_memory for a larger one"


def _of_this_machine() -> tuple[str, str]:
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
    yield Choice("resources.memory", "16Gi", "small models, and a checkpoint in flight")
    yield Choice("resources.shm", "2Gi", "checkpoints are staged in memory")


def _mps(adapted: bool) -> Iterator[Choice]:
    yield Choice("training.precision", "fp32", "autocast on MPS is young, and its GPU gains little by 16 bits")
    yield Choice("training.gradient_checkpointing", True, "the GPU shares its memory with everything else")
    yield Choice("training.optimizer", "adamw_torch", "the fused kernels are CUDA's")
    yield Choice("training.workers", 0, "on macOS each worker imports everything again")
    yield Choice("model.dtype", "float32", "as the arithmetic")
    yield Choice("model.attention", "sdpa", "torch's own; the others need CUDA")
    yield Choice("resources.gpus", 0, "Kubernetes has no resource for MPS")


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


GIB = 2**30
USABLE = 0.95
"""Usable share of a device's memory: the allocator has holes."""
GIGABYTES = {
    "H200": 141, "H100": 80, "H20": 96, "B200": 180, "A100": 40, "A6000": 48, "A30": 24, "A10": 24, "L40": 48, "L4": 24,
    "V100": 16, "P100": 16, "T4": 16, "4090": 24, "3090": 24, "MI300X": 192, "MI250X": 128,
}  # fmt: skip
"""Part of an accelerator's name → memory, where its label does not have it; the smallest of several."""
LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name",
          "amd.com/gpu.product-name")  # fmt: skip
"""Labels of nodes with their accelerator's name."""
MEBIBYTES = ("nvidia.com/gpu.memory", "karpenter.k8s.aws/instance-gpu-memory")
"""Labels of nodes with its memory, in MiB."""


@dataclass(frozen=True)
class Device:
    """Bytes of memory that training has to fit into, and how they are known."""

    bytes: float
    source: str


def memory_report(recipe: Recipe) -> Iterator[str]:
    """Yields lines with the estimate for each training of a recipe that asks for a GPU or for memory."""
    parts = recipe.phase_recipes()
    start = recipe.model
    for part in [x.model_copy(update={"model": start}) if x.model.base == PREVIOUS else x for x in parts] or [recipe]:
        asked = part.resources
        if asked.gpus or asked.gpu_memory or asked.memory:  # otherwise nothing imports torch
            yield from _of_training(part, f" of {part.name}" if recipe.phases else "")


def device(resources: Resources) -> Device | None:
    """Returns the memory of a pod that runs the model, None where the recipe does not tell."""
    if resources.gpus == 0:
        if resources.memory is None:
            return None
        return Device(amount(resources.memory) - amount(resources.shm or "0"), "resources.memory less shm")
    if resources.gpu_memory:
        return Device(amount(resources.gpu_memory), "resources.gpu_memory")
    labels = resources.node_selector
    for label in MEBIBYTES:
        if labels.get(label, "").isdigit():
            return Device(float(labels[label]) * 2**20, f"{label} of the node")
    for label in LABELS:
        if product := labels.get(label):
            size = _gigabytes(product)
            return Device(size * 1e9, f"{label}: {product}") if size else None
    return None


def _gigabytes(product: str) -> float | None:
    """Returns the memory by an accelerator's name; a MIG part's own."""
    name = product.upper()
    for pattern in (r"MIG-\d+G\.(\d+)GB", r"(\d+) ?GB"):
        if match := re.search(pattern, name):
            return float(match[1])
    return next((size for part, size in GIGABYTES.items() if re.search(rf"(?<![A-Z0-9]){part}", name)), None)


def _of_training(recipe: Recipe, of: str) -> Iterator[str]:
    rows = ""
    if recipe.training.micro_batch_size == "auto":
        recipe = _changed(recipe, "training.micro_batch_size", recipe.training.batch_size) or recipe
        rows = f" at {recipe.training.batch_size} rows per forward pass; auto takes fewer where these do not fit"
    try:
        estimate = _estimate(recipe)
    except UserError as error:
        yield f"memory{of}: not estimated: {error.message}"
        return
    where = _here_or_there(recipe)
    host = "the host" if recipe.processes == 1 else f"one of {recipe.processes} processes"
    on = "one GPU" if recipe.resources.gpus else host
    yield f"memory of {on}{of}, estimated{rows}:"
    width = max(len(item.name) for item in estimate.items)
    for item in estimate.items:
        yield f"  {item.name:<{width}}  {_size(item.bytes)}  {item.how}"
    yield f"  {'total':<{width}}  {_size(estimate.total)}  {_compared(estimate.total, where, recipe)}"
    if where and estimate.total > USABLE * where.bytes:
        yield f"warning: this does not fit into {where.bytes / GIB:.1f} GiB. Smaller:"
        for change, total in _remedies(recipe, where):
            yield f"  {change:<42}  {_size(total)}{'  fits' if total <= USABLE * where.bytes else ''}"


def _estimate(recipe: Recipe) -> "Estimate":
    from baton.models import memory  # which imports torch

    return memory.estimate(recipe, memory.build_skeleton(recipe))


def _here_or_there(recipe: Recipe) -> Device | None:
    """Returns the device that the recipe asks for, else this machine's GPU."""
    target = device(recipe.resources)
    if target is None and recipe.resources.gpus and (gpu := machine.gpu()):
        return Device(gpu.bytes, f"{gpu.name} of this machine")
    if target and not recipe.resources.gpus and recipe.processes > 1:
        return Device(target.bytes / recipe.processes, f"{target.source}, of each process")
    return target


def _compared(total: int, where: Device | None, recipe: Recipe) -> str:
    if where is None:
        return "of an unknown GPU; name its memory in resources.gpu_memory to see whether that fits"
    whole = "" if recipe.parallel.splits_weights else ", each with the whole model"
    several = f" each{whole}" if recipe.resources.gpus > 1 else ""
    return f"of {where.bytes / GIB:.1f} GiB ({where.source}){several}: {total / where.bytes:.0%}"


def _remedies(recipe: Recipe, where: Device) -> Iterator[tuple[str, int]]:
    """Yields single changes that take less memory, each with its total."""
    now = _estimate(recipe).total
    rows = recipe.training.batch_size // recipe.world_size
    smaller = [n for n in range(recipe.micro_batch_size_per_process - 1, 0, -1) if rows % n == 0]
    sizes = [(n, total) for n in smaller if (total := _total(recipe, "training.micro_batch_size", n))]
    if fitting := [entry for entry in sizes if entry[1] <= USABLE * where.bytes] or sizes[-1:]:
        yield f"training.micro_batch_size: {fitting[0][0]}", fitting[0][1]
    for path, value in (
        ("training.gradient_checkpointing", True),
        ("training.optimizer", "paged_adamw_8bit"),
        ("training.parallel", {"strategy": "fsdp"}),
        ("adapter", {"r": 16}),
        ("model.quantization", {"bits": 4}),
    ):
        total = None if attrgetter(path)(recipe) == value else _total(recipe, path, value)
        if total and total < now:
            yield f"{path}: {_written(value)}", total


def _total(recipe: Recipe, path: str, value: object) -> int | None:
    changed = _changed(recipe, path, value)
    try:
        return _estimate(changed).total if changed else None
    except UserError:
        return None


def _changed(recipe: Recipe, path: str, value: object) -> Recipe | None:
    """Returns the recipe with a value changed, None where that makes no recipe."""
    try:
        return load.with_values(recipe, {path: value})
    except UserError:
        return None


def _written(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size(size: float) -> str:
    return f"{size / GIB:7.2f} GiB" if size >= GIB else f"{size / 2**20:7.2f} MiB"
