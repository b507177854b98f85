"""`baton diff`: the first logged value, checkpoint and tensor in which two runs differ, and the likely cause.

Both runs are only read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypedDict

from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError, UserError
from baton.prove.audit import TIMED, LoggedDifference, Value, compare, fetch_read_only
from baton.recipe import load
from baton.runs.documents import AttachedRun, OwnCode, PinnedModels, RunInfo, SplitData
from baton.runs.plan import Plan
from baton.runs.run import Run, identity
from baton.scratch import scratch_folder

MAX_TENSORS = 20
"""Differing tensors to list, those that differ most first."""


class StateDifference(TypedDict):
    """The first common checkpoint whose state differs."""

    step: int
    equal_until: int  # newest common checkpoint of the same state before it, 0 for none
    parts: list[str]
    tensors: list[Value]
    num_tensors: int


class RunDifference(TypedDict):
    """Difference of run `b` from run `a`; `recipe`, `data` and `environment` are lines in words."""

    a: str
    b: str
    equal: bool
    compared_steps: list[int]  # common checkpoints
    first_value: LoggedDifference | None
    first_state: StateDifference | None
    recipe: list[str]
    data: list[str]
    environment: list[str]
    cause: str


def diff(a: Run, b: Run, steps: tuple[int | None, int | None] = (None, None)) -> RunDifference:
    """Compares two runs, or their checkpoints of these steps alone.

    Raises:
        UserError: one of them has no checkpoint of its step.
    """
    pairs = _pairs(CheckpointStore(a), CheckpointStore(b), steps)
    first_value = _first_value(CheckpointStore(a), CheckpointStore(b), pairs)
    first_state = _first_state(a, b, pairs)
    result: RunDifference = {
        "a": a.uri,
        "b": b.uri,
        "equal": bool(pairs) and first_value is None and first_state is None,
        "compared_steps": [mine.step for mine, _ in pairs],
        "first_value": first_value,
        "first_state": first_state,
        "recipe": _recipe(a, b),
        "data": _data(a, b),
        "environment": _environment(pairs),
        "cause": "",
    }
    return {**result, "cause": _cause(a, b, pairs, result)}


Pairs = Sequence[tuple[Checkpoint, Checkpoint]]  # checkpoints to compare, by ascending step


def _pairs(a: CheckpointStore, b: CheckpointStore, steps: tuple[int | None, int | None]) -> Pairs:
    if steps != (None, None):
        chosen = [_of_step(store, step) for store, step in zip((a, b), steps, strict=True)]
        return [(chosen[0], chosen[1])]
    ours, theirs = ({checkpoint.step: checkpoint for checkpoint in store.committed()} for store in (a, b))
    return [(ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys())]


def _of_step(store: CheckpointStore, step: int | None) -> Checkpoint:
    found = store.newest() if step is None else store.read(step)
    if found is None:
        there = ", ".join(map(str, store.committed_steps())) or "none"
        wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise UserError(f"run {store.run.name!r} has no {wanted}; it has {there}.")
    return found


def _first_value(a: CheckpointStore, b: CheckpointStore, pairs: Pairs) -> LoggedDifference | None:
    """Returns the first logged value that differs, up to the step that both have reached."""
    mine, other = pairs[-1] if pairs else (a.newest(), b.newest())
    if mine is None or other is None:
        return None
    logs = []
    for store, checkpoint in ((a, mine), (b, other)):
        entries = [entry for entry in store.history(checkpoint) if int(entry["step"]) <= mine.step]
        # Two entries of one step, losses and evaluation, may come in either order.
        logs.append({(int(x["step"]), name): x[name] for x in entries for name in x if not name.endswith(TIMED)})
    common = sorted(logs[0].keys() & logs[1].keys(), key=lambda key: (key[0], key[1] != "loss", key[1]))
    for step, name in common:
        ours, theirs = (log[step, name] for log in logs)
        if repr(ours) != repr(theirs):  # NaN equals itself
            return {"step": step, "name": name, "expected": ours, "found": theirs}
    return None


def _first_state(a: Run, b: Run, pairs: Pairs) -> StateDifference | None:
    equal_until = 0
    for mine, other in pairs:
        if mine.digest == other.digest:
            equal_until = mine.step
            continue
        ours, theirs = mine.meta.state, other.meta.state
        parts = [part for part in dict.fromkeys([*ours, *theirs]) if ours.get(part) != theirs.get(part)]
        tensors = _tensors(a, b, mine, other)
        return {
            "step": mine.step,
            "equal_until": equal_until,
            "parts": [part for part in parts if part != "state"],
            "tensors": tensors[:MAX_TENSORS],
            "num_tensors": len(tensors),
        }
    return None


def _tensors(a: Run, b: Run, mine: Checkpoint, other: Checkpoint) -> list[Value]:
    with scratch_folder("diff") as scratch:
        folders = []
        for name, run, checkpoint in (("a", a, mine), ("b", b, other)):
            prefix = CheckpointStore(run).prefix(checkpoint.step)
            folders.append(fetch_read_only(run.storage, prefix, checkpoint.manifest, f"{scratch}/{name}"))
        return compare(folders[0], folders[1], after=mine.step).differing


def _recipe(a: Run, b: Run) -> list[str]:
    documents = [_settings(run) for run in (a, b)]
    return load.changed_paths(*documents)


def _settings(run: Run) -> dict[str, Any]:
    """Returns the settings that decide bits: of a recipe, or of a script."""
    if attached := run.read(AttachedRun):
        return {**attached.facts, "chunks": attached.chunks}
    return identity(run.recipe())


PLAN = "the chunk plan differs"
DATA = {
    "rows differ": SplitData.NAME,
    "the base model differs": PinnedModels.NAME,
    "own code differs": OwnCode.NAME,
    PLAN: Plan.NAME,
}


def _data(a: Run, b: Run) -> list[str]:
    lines = [sentence for sentence, name in DATA.items() if a.raw(name) != b.raw(name)]
    made = [(info.made.formats if (info := run.read(RunInfo)) else {}) for run in (a, b)]
    return lines + [f"formats: {line}" for line in load.changed_paths(*made)]


def _environment(pairs: Pairs) -> list[str]:
    lines: dict[str, None] = {}
    for mine, other in pairs:
        lines |= dict.fromkeys(other.meta.fingerprint.differences(mine.meta.fingerprint))
    return list(lines)


def _cause(a: Run, b: Run, pairs: Pairs, found: RunDifference) -> str:
    if not pairs:
        return "no common checkpoint to compare"
    if found["equal"]:
        return "none: losses and states are bit-identical"
    # A chunk count changes no bits: another cause is likelier.
    settings = [line for line in found["recipe"] if not line.startswith("chunks.")]
    if settings:
        return f"different settings: {'; '.join(settings)}"
    data = [line for line in found["data"] if line != PLAN]
    if data:
        return f"different data, model or code: {'; '.join(data)}"
    skips = [set(mine.meta.skips) for mine in pairs[-1]]
    if skips[0] != skips[1]:
        return f"different skipped steps: {sorted(skips[0] ^ skips[1])}"
    if found["environment"]:
        return f"different environment: {'; '.join(found['environment'])}"
    lost: dict[str, str] = {}
    for checkpoint in pairs[-1]:
        lost |= checkpoint.meta.hooks.lost if checkpoint.meta.hooks else {}
    if lost:
        return f"state of your code that checkpoints do not carry: {', '.join(lost)}"
    if boundary := _boundary(a, b, found):
        return f"state lost or changed when the chunk after step {boundary} resumed"
    remedy = "`baton verify replay RUN --chunk N` trains one chunk again"
    return f"unknown: code or a kernel that is not deterministic; {remedy}"


def _boundary(a: Run, b: Run, found: RunDifference) -> int | None:
    """Returns the last chunk boundary of either run before the first difference."""
    steps = [entry["step"] for entry in (found["first_value"], found["first_state"]) if entry]
    targets: set[int] = set()
    for run in (a, b):
        with contextlib.suppress(BatonError):
            targets.update(run.plan().targets[:-1])
    return max((target for target in targets if target < min(steps)), default=None)
