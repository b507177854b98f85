"""Manifests in the wrong place or with changed values: passed over by readers and writers, found without a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.checkpoint.proof import proof_part
from baton.checkpoint.store import Checkpoint, CheckpointMeta, Parent, chained, combined
from baton.local.results import verify_checkpoints
from baton.runs.documents import PARTS, Promoted


def _manifest(checkpoints: Any, step: int) -> str:
    return f"{checkpoints.store.prefix(step)}/manifest.json"


def _as_generation_2(checkpoints: Any, data: bytes) -> None:
    checkpoints.storage.write(_manifest(checkpoints, 10).replace("manifest", "manifest-2"), data)


STALE: dict[str, Callable[[Any, bytes], object]] = {
    "under the newest step": lambda checkpoints, data: checkpoints.storage.write(_manifest(checkpoints, 10), data),
    "as the next generation": _as_generation_2,
}


@pytest.mark.parametrize("kind", STALE)
def test_a_step_is_committed_again_above_a_manifest_of_another(kind: str, checkpoints: Any) -> None:
    checkpoints.commit_all(5, 10)
    STALE[kind](checkpoints, checkpoints.storage.read(_manifest(checkpoints, 5)))
    assert checkpoints.store.committed_steps() == [5]
    again = checkpoints.commit(10)
    assert checkpoints.store.read(10) == again
    assert checkpoints.store.committed_steps() == [5, 10]


def test_a_step_with_its_own_manifest_is_not_committed_again(checkpoints: Any) -> None:
    first = checkpoints.commit(10)
    writer = checkpoints.send(10)
    assert checkpoints.store.commit(10, writer, CheckpointMeta(digest="another")) == (first, False)


def _chain(checkpoints: Any) -> Checkpoint:
    """Commits and proves steps 5 and 10, with digests as a chunk makes them, and returns the last one."""
    before = None
    for chunk, step in enumerate((5, 10), 1):
        parts = {name: f"{name} of {step}" for name in PARTS}
        digest = combined(parts)
        meta = CheckpointMeta(
            digest=digest,
            state={**parts, "state": digest},
            parent=Parent(step=before.step, digest=before.digest) if before else None,
            chain=chained(before, digest),
            chunk=chunk,
        )
        before = checkpoints.store.commit(step, checkpoints.send(step), meta)[0]
        checkpoints.store.run.write(proof_part(checkpoints.store, before), chunk)
    assert before
    return before


def _changed(meta: dict[str, Any], path: str) -> None:
    *folders, last = path.split(".")
    for folder in folders:
        meta = meta[folder]
    meta[last] = meta[last] + 1 if isinstance(meta[last], int) else f"{meta[last][:-1]}x"


def _problems(checkpoints: Any) -> dict[int, list[str]]:
    return {row["step"]: row["problems"] for row in verify_checkpoints(checkpoints.store.run)}


FIELDS = ("digest", "state.state", "state.weights", "parent.digest", "parent.step", "chain")


@pytest.mark.parametrize("is_proven", [True, False], ids=["proven", "not proven"])
@pytest.mark.parametrize("path", [*FIELDS, None])
def test_a_changed_value_is_found_without_a_key(path: str | None, is_proven: bool, checkpoints: Any) -> None:
    newest = _chain(checkpoints)
    if not is_proven:
        checkpoints.storage.remove(checkpoints.store.run.path("proof/chunk-002.json"))
    manifest = json.loads(checkpoints.storage.read(_manifest(checkpoints, 10)))
    before = _problems(checkpoints)
    if path:
        _changed(manifest["meta"], path)
    checkpoints.storage.write(_manifest(checkpoints, 10), json.dumps(manifest).encode())
    is_found = path is not None and (is_proven or path != "parent.step")  # a step that is gone may have been removed
    after = _problems(checkpoints)
    assert (after[5], after[newest.step] != before[newest.step]) == (before[5], is_found)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"newest": 5}'])
def test_a_damaged_document_that_its_stage_writes_again_is_absent(data: bytes, checkpoints: Any) -> None:
    run = checkpoints.store.run
    run.storage.write(run.path(Promoted.NAME), data)
    run.storage.write(run.path("proof/chunk-001.json"), data)
    assert (run.read(Promoted), run.restored_parts(), run.verified_step()) == (None, [], 0)
