"""What a finished run is compared by with one that nobody disturbed: bits, rows, and what lies in the store."""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from unittest import mock

from baton.checkpoint import retention
from baton.checkpoint.chain import CHAIN_FILE, SIGNATURE_FILE
from baton.checkpoint.store import CheckpointStore, LogEntry
from baton.local import results
from baton.prove import prove
from baton.runs.run import Run
from baton.store import bundle
from baton.store.cache import NodeCache
from baton.store.manifest import read_manifest

_ATTEMPT = re.compile(r"(.*)/([0-9a-f]{12})/.+")
_MANIFEST = re.compile(r"(.*)/manifest(-\d+)?\.json")
_CHECKPOINT = re.compile(r"checkpoints/step-(\d+)/manifest\.json")
_MAY_STAY = re.compile(rf"{_CHECKPOINT.pattern}|(checkpoints|exports?)/.*/?removed-[0-9a-f]{{12}}")
"""Manifests that are looked at by themselves, and marks of removals."""
_MANY = ("records/", "metrics/", "restarts/", "proof/restored-", "progress.json")
"""What each attempt leaves one of, or none, as it should."""
_OF_A_RUN = ("README.md", "baton.json", CHAIN_FILE, SIGNATURE_FILE)
"""Files of an export that name their run, or state what its stages did."""


@dataclass(frozen=True)
class Finished:
    """A run at its end.

    Attributes:
        outcome: Its losses and the state of its last checkpoint.
        rows: The micro-batches of each step, by the process that trained it: rows and a digest each.
        evaluated: Its examples and its figures, as they lie in the store.
        exported: SHA-256 of each file of its exports.
        names: What lies in the store, with a star where a writer's name is.
    """

    outcome: prove.FinishedRun
    rows: Mapping[int, Mapping[int, list[tuple[int, str]]]]
    evaluated: tuple[bytes, bytes]
    exported: Mapping[str, str]
    names: frozenset[str]


def finished(run: Run, notes: Path) -> Finished:
    """Returns what a run has come to.

    Args:
        run: The run, at its end.
        notes: What its processes noted of the rows they trained on.
    """
    storage = run.storage
    exported = {}
    for path in storage.find(run.path("")):
        if re.match(r"exports?/", path) and _MANIFEST.fullmatch(path):
            prefix = run.path(path.rpartition("/")[0])
            manifest = read_manifest(storage, prefix)
            assert manifest is not None
            lost = bundle.verify(storage, prefix, manifest)
            assert not lost, lost
            where = path.rpartition("/")[0]
            exported |= {f"{where}/{name}": entry["sha256"] for name, entry in manifest.files.items()}
    return Finished(
        outcome=prove.outcome(run, len(run.plan().targets)),
        rows=_rows(notes),
        evaluated=(storage.read(run.path("examples.jsonl")), storage.read(run.path("evaluation.json"))),
        exported={name: digest for name, digest in exported.items() if name.rpartition("/")[2] not in _OF_A_RUN},
        names=frozenset(
            re.sub(r"/[0-9a-f]{12}/", "/*/", name) for name in storage.find(run.path("")) if not name.startswith(_MANY)
        ),
    )


def _rows(notes: Path) -> dict[int, dict[int, list[tuple[int, str]]]]:
    steps: dict[int, dict[int, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for line in notes.read_text().splitlines():
        pid, step, count, digest = line.split()
        steps[int(step)][int(pid)].append((int(count), digest))
    return {step: dict(attempts) for step, attempts in steps.items()}


def differences(undisturbed: Finished, disturbed: Finished) -> list[str]:
    """Returns a line for each thing in which a run is not as the undisturbed one."""
    lines = []
    if difference := prove.difference(undisturbed.outcome, disturbed.outcome):
        lines.append(f"the run differs: {json.dumps(difference)}")
    lines += _rows_trained(undisturbed, disturbed)
    for name, expected, found in zip(
        ("examples.jsonl", "evaluation.json"), undisturbed.evaluated, disturbed.evaluated, strict=True
    ):
        if expected != found:
            lines.append(f"{name} differs: {len(expected.splitlines())} and {len(found.splitlines())} lines")
    for name in undisturbed.exported.keys() | disturbed.exported.keys():
        if undisturbed.exported.get(name) != disturbed.exported.get(name):
            lines.append(f"{name} differs: {undisturbed.exported.get(name)} and {disturbed.exported.get(name)}")
    return lines


def _rows_trained(undisturbed: Finished, disturbed: Finished) -> list[str]:
    """Compares each attempt at each step: its rows are the step's, or their beginning where the attempt ended there."""
    lines = []
    if undisturbed.rows.keys() != disturbed.rows.keys():
        lines.append(f"other steps were trained: {sorted(undisturbed.rows.keys() ^ disturbed.rows.keys())}")
    last = {pid: step for step, attempts in sorted(disturbed.rows.items()) for pid in attempts}
    for step, attempts in disturbed.rows.items():
        (expected,) = undisturbed.rows.get(step, {0: []}).values()
        for pid, found in attempts.items():
            if found != expected and not (last[pid] == step and found == expected[: len(found)]):
                lines.append(f"step {step} of process {pid} was trained on other rows: {found}, not {expected}")
        if not any(found == expected for found in attempts.values()):
            lines.append(f"step {step} was never trained on all of its rows")
    return lines


def steps_logged_twice(run: Run) -> list[str]:
    """Returns the steps that the history of the last checkpoint holds more than one loss of."""
    steps = [entry["step"] for entry in _history(run) if "loss" in entry]
    return [f"step {step} was logged {steps.count(step)} times" for step in sorted(set(steps)) if steps.count(step) > 1]


def _history(run: Run) -> list[LogEntry]:
    store = CheckpointStore(run)
    checkpoint = store.read(run.plan().num_steps)
    assert checkpoint is not None
    return store.history(checkpoint)


def damaged(run: Run) -> list[str]:
    """Reads all checkpoints back."""
    rows = results.verify_checkpoints(run)
    return [f"step {row['step']}: {problem}" for row in rows for problem in row["problems"]]


def left_behind(run: Run, undisturbed: Finished, cleared: Callable[[Run], None]) -> list[str]:
    """Returns what lies in a run's folder that no manifest names and an undisturbed run does not have, and what lacks.

    What killed uploads left may still be under way and is taken when it is an hour old: here that hour is over. Which
    steps have a checkpoint is for `checkpoints_left`.

    Args:
        run: The run, at its end.
        undisturbed: The one it is compared with.
        cleared: Does what is done an hour later.
    """
    with an_hour_later():
        cleared(run)
    names = [name for name in run.storage.find(run.path("")) if not name.startswith(_MANY)]
    folders = set()
    for name in names:
        if match := _MANIFEST.fullmatch(name):
            manifest = read_manifest(run.storage, run.path(match[1]))
            assert manifest is not None, name
            folders.add(f"{match[1]}/{manifest.folder}")
    lines = []
    for name in names:
        if (match := _ATTEMPT.fullmatch(name)) and f"{match[1]}/{match[2]}" not in folders:
            lines.append(f"{name} is named by no manifest")
        elif match is None and name not in undisturbed.names and not _MAY_STAY.fullmatch(name):
            lines.append(f"{name} is not there undisturbed")
    plain = {name for name in undisturbed.names if "/*/" not in name and not name.startswith("checkpoints/")}
    return [*lines, *(f"{name} is there undisturbed" for name in sorted(plain.difference(names)))]


def checkpoints_left(run: Run, told: Collection[int]) -> list[str]:
    """Returns how the checkpoints that are left are not the newest of those that were committed.

    They cannot be compared with an undisturbed run's: one checkpoint is on its way at a time, so the machine's pace
    decides which steps between a chunk's first and its last have one.

    Args:
        run: The run, at its end.
        told: Steps whose commit its chunks told; those of a chunk that was killed in between are known by what is left.
    """
    keep = run.recipe().chunks.keep
    assert not keep.every, "other ones stay as well"
    assert not any("eval_loss" in entry for entry in _history(run)), "the best one stays as well"
    left = sorted(int(match[1]) for name in run.storage.find(run.path("")) if (match := _CHECKPOINT.fullmatch(name)))
    expected = sorted({*told, *left, run.plan().num_steps})[-keep.last :]
    return [] if left == expected else [f"checkpoints of steps {left} are left, not of {expected}"]


def an_hour_later() -> AbstractContextManager[object]:
    """What is abandoned after an hour is abandoned now, also what is as new as the store's clock, its newest object."""
    return mock.patch.object(retention, "ABANDONED_AFTER", timedelta(hours=-1))


def cache_left(cache: NodeCache, scratch: Path) -> list[str]:
    """Returns the files of a node's cache that are not whole ones under their hashes, an hour later."""
    for name in os.listdir(cache.folder):
        if "." in name:
            os.utime(f"{cache.folder}/{name}", (time.time() - 7200, time.time() - 7200))
    scratch.write_text(str(time.time()))
    cache.keep(bundle.file_sha256(str(scratch)), str(scratch))
    scratch.unlink()
    wrong = [name for name in os.listdir(cache.folder) if bundle.file_sha256(f"{cache.folder}/{name}") != name]
    return [f"node cache: {name} is not what its name says" for name in wrong]
