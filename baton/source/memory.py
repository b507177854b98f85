"""Memory of a GPU that training will take, whether it fits, and changes that take less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from baton import machine
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.base import amount
from baton.recipe.cluster import Resources
from baton.recipe.recipe import Recipe
from baton.recipe.search import PREVIOUS

if TYPE_CHECKING:
    from baton.models.memory import Estimate

GIB = 2**30
USABLE = 0.95
"""Usable share of a device's memory: the allocator leaves holes."""
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


def report(recipe: Recipe) -> Iterator[str]:
    """Yields lines with the estimate for each training of a recipe that asks for a GPU or for memory."""
    parts = recipe.phase_recipes()
    start = recipe.model
    for part in [x.model_copy(update={"model": start}) if x.model.base == PREVIOUS else x for x in parts] or [recipe]:
        asked = part.resources
        if asked.gpus or asked.gpu_memory or asked.memory:  # otherwise nothing imports torch
            yield from _report(part, f" of {part.name}" if recipe.phases else "")


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


def _report(recipe: Recipe, of: str) -> Iterator[str]:
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
        yield f"warning: this does not fit into {where.bytes / GIB:.1f} GiB. What takes less:"
        for change, total in _remedies(recipe, where):
            yield f"  {change:<42}  {_size(total)}{'  fits' if total <= USABLE * where.bytes else ''}"


def _estimate(recipe: Recipe) -> Estimate:
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
