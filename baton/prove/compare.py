"""Two checkpoints compared file by file and tensor by tensor, bit for bit.

The files alone count: their manifests are claims of whoever wrote them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from baton.checkpoint.sharded import code_in
from baton.errors import DamagedError

TIMED = ("_runtime", "_per_second", "step_time")
"""Ends of values' names that depend on the clock."""
HISTORY = "trainer_state.json"
MAX_TOLD = 100
"""Differing values to list one by one, those that differ most first."""


class Value(TypedDict):
    """A tensor, or another value, that differs: in how many of its numbers, and by how much at most."""

    file: str
    name: str
    what: str
    count: int
    of: int
    max_abs: float | None


class LoggedDifference(TypedDict):
    """The first logged value that differs."""

    step: int
    name: str
    expected: float | str | None
    found: float | str | None


@dataclass
class Comparison:
    """Numbers of compared files, tensors in them, numbers in these and logged values; and the differences."""

    files: int = 0
    tensors: int = 0
    numbers: int = 0
    logged: int = 0
    differing: list[Value] = field(default_factory=list)
    """Those that differ most first."""
    first: LoggedDifference | None = None
    first_loss: LoggedDifference | None = None

    @property
    def is_equal(self) -> bool:
        return not self.differing and self.first is None


def compare(expected: str, found: str, after: int) -> Comparison:
    """Compares the files of two checkpoints in local folders, and the values logged after a step.

    Raises:
        DamagedError: a pickle in one of them holds code.
    """
    for folder in (expected, found):
        if problems := code_in(folder):
            raise DamagedError(f"{folder}: {'; '.join(problems)}.")
    result = Comparison()
    names = {
        os.path.relpath(os.path.join(parent, name), folder)
        for folder in (expected, found)
        for parent, _, files in os.walk(folder)
        for name in files
    }
    for name in sorted(names):
        result.files += 1
        paths = os.path.join(expected, name), os.path.join(found, name)
        absent = [path for path in paths if not os.path.isfile(path)]
        if absent:
            where = "in the run's checkpoint" if absent[0] == paths[0] else "in the one trained again"
            result.differing.append(_value(name, "", f"the file is not {where}"))
        elif name == HISTORY:
            _compare_history(*paths, after, result)
        else:
            _compare_file(name, *paths, result)
    result.differing.sort(key=lambda value: -(value["max_abs"] if value["max_abs"] is not None else math.inf))
    return result


def _compare_file(name: str, expected: str, found: str, result: Comparison) -> None:
    if name.endswith(".safetensors"):
        from safetensors.torch import load_file

        _compare_leaves(name, load_file(expected), load_file(found), result)
    elif name.endswith((".pt", ".pth", ".bin")) and os.sep not in name:
        _compare_leaves(name, _pickled(expected), _pickled(found), result)
    elif Path(expected).read_bytes() != Path(found).read_bytes():
        result.differing.append(_value(name, "", "the file's bytes differ"))


def _compare_leaves(name: str, expected: Mapping[str, Any], found: Mapping[str, Any], result: Comparison) -> None:
    import torch

    for key in sorted(expected.keys() | found.keys()):
        if key.endswith(TIMED):
            continue
        if key not in expected or key not in found:
            where = "trained again" if key not in found else "run's checkpoint"
            result.differing.append(_value(name, key, f"not in the {where}"))
            continue
        ours, theirs = expected[key], found[key]
        if isinstance(ours, torch.Tensor):
            result.tensors += 1
            result.numbers += ours.numel()
        if difference := _differs(name, key, ours, theirs):
            result.differing.append(difference)


def _differs(file: str, name: str, ours: Any, theirs: Any) -> Value | None:
    import torch

    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return None if repr(ours) == repr(theirs) else _value(file, name, f"{_short(ours)} → {_short(theirs)}")
    kinds = (ours.dtype, tuple(ours.shape)), (theirs.dtype, tuple(theirs.shape))
    if kinds[0] != kinds[1]:
        return _value(file, name, f"{kinds[0][0]} {kinds[0][1]} → {kinds[1][0]} {kinds[1][1]}", of=ours.numel())
    flat = [tensor.detach().cpu().contiguous().flatten() for tensor in (ours, theirs)]
    # By their bits: NaN equals itself, and −0 is not 0.
    bits = [tensor.view(torch.uint8) for tensor in flat]
    if torch.equal(*bits):
        return None
    unlike = (bits[0] != bits[1]).view(-1, flat[0].element_size()).any(dim=1)
    gap = (flat[0].double() - flat[1].double()).abs()[unlike]
    finite = gap[gap.isfinite()]
    return {
        "file": file,
        "name": name,
        "what": str(ours.dtype).removeprefix("torch."),
        "count": int(unlike.sum()),
        "of": ours.numel(),
        "max_abs": float(finite.max()) if len(finite) == len(gap) else None,
    }


def _compare_history(expected: str, found: str, after: int, result: Comparison) -> None:
    ours, theirs = (_logged(path, after) for path in (expected, found))
    result.logged = sum(len(entry) - 1 for entry in ours)
    for mine, other in zip(ours, theirs, strict=False):
        for name in sorted(mine.keys() | other.keys(), key=lambda name: (name != "step", name != "loss", name)):
            if repr(mine.get(name)) == repr(other.get(name)):
                continue
            step = int(min(mine["step"], other["step"]))
            entry: LoggedDifference = {"step": step, "name": name, "expected": mine.get(name), "found": other.get(name)}
            result.first = result.first or entry
            result.first_loss = result.first_loss or (entry if name == "loss" else None)
    if len(ours) != len(theirs) and result.first is None:
        longer = max(ours, theirs, key=len)
        step = int(longer[min(len(ours), len(theirs))]["step"])
        result.first = {"step": step, "name": "number of entries", "expected": len(ours), "found": len(theirs)}


def _logged(path: str, after: int) -> list[dict[str, float]]:
    with open(path, encoding="utf-8") as file:
        history = json.load(file)["log_history"]
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMED)}
        for entry in history
        if entry["step"] > after
    ]


def _pickled(path: str) -> dict[str, Any]:
    """Returns the values of a pickle by their paths in it; `code_in` has looked through it."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return dict(_leaves(torch.load(path, weights_only=True, map_location="cpu"), ""))


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}".lstrip("."))
    # A list of numbers alone, such as a generator's state, is one value.
    elif isinstance(node, list | tuple) and not all(isinstance(value, int | float) for value in node):
        for number, value in enumerate(node):
            yield from _leaves(value, f"{path}.{number}".lstrip("."))
    else:
        yield path, node


def _value(file: str, name: str, what: str, of: int = 1) -> Value:
    return {"file": file, "name": name, "what": what, "count": of, "of": of, "max_abs": None}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
