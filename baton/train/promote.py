"""Checkpoint stage: reads back what a chunk committed, marks newest and best, applies retention, writes the proof."""

from __future__ import annotations

import time

from baton import fork
from baton.checkpoint import proof
from baton.checkpoint.proof import prove
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import DamagedError
from baton.runs.documents import ChunkRecord, ProofPart
from baton.runs.outcomes import TrialInfo
from baton.runs.run import Run


def read_back(run_uri: str, index: int) -> str:
    """Verifies the checkpoint that a chunk left, see `promote`, and returns the chunk's part of the proof in Markdown.

    Damage is an error after the last chunk alone. It stops no other one: who restores passes over what is damaged.

    Raises:
        DamagedError: the last chunk's checkpoint is not what was committed.
    """
    try:
        return proof.proof_as_markdown(promote(run_uri, index))
    except DamagedError as error:
        run = Run.open(run_uri)
        if index >= run.plan().slots(run.recipe().chunks.spare):
            raise
        run.warn(f"{error} A later chunk makes up for it.")
        return f"# Chunk {index}: not proven\n\n{error}\n\nA later chunk makes up for it.\n"


def promote(run_uri: str, index: int) -> ProofPart | None:
    """Verifies the checkpoint that a chunk left: at its target, or before it where it was preempted.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1, spare ones included.

    Returns:
        The chunk's part of the resume proof, see `baton.checkpoint.proof`; None where it left no checkpoint because
        it was preempted before it had one, or lies before the step that a fork began at.

    Raises:
        DamagedError: what is in the store is not what was committed.
    """
    return promote_in(Run.open(run_uri), index)


def promote_in(run: Run, index: int) -> ProofPart | None:
    """Does what `promote` does, in a run that is open."""
    started = time.time()
    plan, recipe = run.plan(), run.recipe()
    store = CheckpointStore.of(run, recipe)
    attempts = run.attempts(index)
    is_last = index >= plan.slots(recipe.chunks.spare)
    if (before := _gone_since(run, store, index, plan.target(index), is_last=is_last)) is not None:
        run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
        return before
    is_before_fork = plan.target(index) < fork.began(run)
    checkpoint = None if is_before_fork else _left_by(store, plan.target(index), attempts[-1] if attempts else None)
    if checkpoint is None:
        run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
        return None
    part = prove(store, checkpoint, index, attempts, keep=recipe.chunks.keep, targets=plan.targets)
    run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
    return part


def _gone_since(run: Run, store: CheckpointStore, index: int, target: int, *, is_last: bool) -> ProofPart | None:
    """Returns the part of the proof from when the run was here before, if the checkpoint has gone since.

    Retention has taken it, or it is lost while Kubeflow's cache knows of the chunk's success. A later chunk then makes
    up for it, and there is none after the last.
    """
    before = run.read(ProofPart, index)
    if before is None or before.step != target or store.read(target) is not None:
        return None
    later = any(checkpoint.step > target for checkpoint in store.committed())
    if not later and not is_last:
        run.warn(f"{store.storage.uri(store.prefix(target))} is no longer there; a later chunk makes up for it.")
    return before if later or not is_last else None


def _left_by(store: CheckpointStore, target: int, attempt: ChunkRecord | None) -> Checkpoint | None:
    """Returns the checkpoint a chunk left, None for one that was preempted before its first."""
    outcome = attempt.outcome if attempt else None
    checkpoint = store.read(attempt.to_step if attempt and outcome in ("partial", "finished") else target)
    if checkpoint is None and attempt and outcome == "already_done":
        # Early stopping ended the run before the target, or a trial that caught up with others has a later one alone.
        reached = store.read(attempt.to_step)
        checkpoint = reached if reached and (reached.meta.finished or store.run.read(TrialInfo)) else None
    if checkpoint is not None:
        return checkpoint
    if outcome != "partial":
        raise DamagedError(f"{store.storage.uri(store.prefix(target))}: the chunk left no checkpoint there.")
    # The chunk after it may have come further and let retention take this one.
    return store.newest()
