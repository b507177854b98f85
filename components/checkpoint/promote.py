"""Checkpoint stage: reads back what a chunk committed, marks newest and best, applies retention, writes the proof."""

from __future__ import annotations

import logging
import time
from typing import Any

from components.shared import events, forking, retention
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import DamagedError
from components.shared.proof import proof_part
from components.shared.runs import Run, now
from components.shared.store import bundles
from components.shared.store.bundles import Manifest
from components.shared.sweeps import TRIAL

logger = logging.getLogger("baton")


def promote(run_uri: str, index: int) -> dict[str, Any] | None:
    """Verifies the checkpoint that a chunk left: at its target, or before it where its machine was taken away.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1, spare ones included.

    Returns:
        The chunk's part of the resume proof, see `components.shared.proof`; None where it left no checkpoint
        because it was taken away before it had one, or lies before the step that a fork began at.

    Raises:
        DamagedError: what is in the store is not what was committed.
    """
    started = time.time()
    run = Run.open(run_uri)
    store, plan, recipe = CheckpointStore(run), run.plan(), run.recipe()
    attempts = run.records(f"train-chunk-{index:03d}")
    is_last = index >= len(plan.targets) + recipe.chunks.spare
    if (before := _gone_since(run, store, index, plan.target(index), is_last=is_last)) is not None:
        run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
        return before
    behind = plan.target(index) < forking.began(run)
    found = None if behind else _left_by(store, plan.target(index), attempts[-1] if attempts else None)
    if found is None:
        run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
        return None
    step, manifest = found
    bundles.require_whole(run.storage, store.prefix(step), manifest, store.verify(step, manifest))
    part = {
        **proof_part(store, step, manifest),
        "chunk": index,
        "attempts": [_figures(attempt) for attempt in attempts],
        "verified": True,
        "verified_at": now(),
        "verify_seconds": time.time() - started,
    }
    _mark(run, store, step, manifest)
    part["removed"] = retention.summary(retention.prune(store, recipe.chunks.keep, targets=plan.targets))
    run.put(f"proof/chunk-{index:03d}.json", part)
    run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
    events.emit("verified", step=step, bytes=manifest.bytes, digest=manifest.meta["digest"])
    return part


def _gone_since(run: Run, store: CheckpointStore, index: int, target: int, *, is_last: bool) -> dict[str, Any] | None:
    """Returns the part of the proof from when the run was here before, if the checkpoint has gone since.

    Retention has taken it, or it is lost while Kubeflow's cache knows of the chunk's success. A later chunk then makes
    up for it, and there is none behind the last.
    """
    before: dict[str, Any] | None = run.get(f"proof/chunk-{index:03d}.json")
    if before is None or before["step"] != target or store.manifest(target) is not None:
        return None
    later = any(isinstance(found, Manifest) and at > target for at, found in store.committed())
    if not later and not is_last:
        logger.warning("%s is no longer there; a later chunk makes up for it", store.storage.uri(store.prefix(target)))
    return before if later or not is_last else None


def _left_by(store: CheckpointStore, target: int, attempt: dict[str, Any] | None) -> tuple[int, Manifest] | None:
    """Returns the checkpoint a chunk left, None for one that was taken away before its first."""
    partial = attempt is not None and attempt["outcome"] == "partial"
    step = attempt["to_step"] if attempt and partial else target
    manifest = store.manifest(step)
    if manifest is None and attempt and attempt["outcome"] == "already_done" and store.run.get(TRIAL):
        step = attempt["to_step"]  # a trial that caught up with others has a checkpoint beyond the target alone
        manifest = store.manifest(step)
    if manifest is not None:
        return step, manifest
    if not partial:
        raise DamagedError(f"{store.storage.uri(store.prefix(step))}: the chunk left no checkpoint there.")
    # The chunk after it may have come further and let retention take this one.
    return next(((at, found) for at, found in store.committed() if isinstance(found, Manifest)), None)


def _figures(attempt: dict[str, Any]) -> dict[str, Any]:
    names = ("outcome", "from_step", "to_step", "seconds", "total_seconds", "bytes_sent", "bytes_received")
    more = ("lost_steps", "lost_seconds", "save_stalls", "peak_bytes")
    return {name: attempt[name] for name in (*names, *more) if name in attempt}


def _mark(run: Run, store: CheckpointStore, step: int, manifest: Manifest) -> None:
    """Writes which checkpoint is newest and which has the lowest evaluation loss so far."""
    before = run.get("promoted.json")
    if before and before["newest"]["step"] > step:
        return
    losses = store.evaluation_losses(step, manifest)
    committed = {at: found for at, found in store.committed() if isinstance(found, Manifest)}
    best = min((at for at in committed if at in losses), key=losses.__getitem__, default=None)
    document: dict[str, Any] = {"newest": {"step": step, "uri": store.uri(step, manifest)}}
    if best is not None:
        document["best"] = {"step": best, "uri": store.uri(best, committed[best]), "eval_loss": losses[best]}
    run.put("promoted.json", document)
