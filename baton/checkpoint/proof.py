"""The checkpoint stage: reads a chunk's checkpoint back, applies retention, and writes the resume proof.

It runs beside the next chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from baton import events
from baton.checkpoint import retention
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import DamagedError
from baton.recipe.run import Keep
from baton.runs.documents import PHASES_OF_A_CHUNK, CheckpointRef, ChunkAttempt, ChunkRecord, Promoted, ProofPart
from baton.runs.outcomes import TrialInfo
from baton.runs.run import Run, now

FIGURES = frozenset(ChunkAttempt.model_fields)


def proof_part(store: CheckpointStore, checkpoint: Checkpoint) -> ProofPart:
    """Returns a checkpoint's part of the proof: its parent, comparisons and machine."""
    meta = checkpoint.meta
    return ProofPart(
        step=checkpoint.step,
        digest=meta.digest,
        parent_step=meta.parent.step if meta.parent else None,
        parent_digest=meta.parent.digest if meta.parent else None,
        chain=meta.chain,
        level=meta.restored.level,
        checked=meta.restored.checked,
        restored_step=meta.restored.step,
        skipped=meta.restored.skipped,
        hooks=meta.hooks,
        uri=store.uri(checkpoint),
        bytes=checkpoint.bytes,
        fingerprint=meta.fingerprint,
        seconds=meta.seconds,
        moved=meta.moved,
        work=meta.work,
        forked_from=meta.forked_from,
    )


def prove(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    index: int,
    attempts: Sequence[ChunkRecord],
    *,
    keep: Keep,
    targets: Sequence[int],
) -> ProofPart:
    """Reads a chunk's checkpoint back, else `RewritableDamageError`; applies retention and writes the proof."""
    started = time.time()
    store.require_whole(checkpoint, store.verify(checkpoint))
    verify_seconds = time.time() - started
    # Before retention, which keeps the newest checkpoint read back and knows it by this mark.
    _mark(store, checkpoint)
    removed = retention.tidy(store, keep, targets=targets)
    # Costs of each attempt, without the proof's other fields.
    figures = [{name: value for name, value in each.to_json().items() if name in FIGURES} for each in attempts]
    part = proof_part(store, checkpoint).model_copy(
        update={
            "chunk": index,
            "attempts": [ChunkAttempt.model_validate(each) for each in figures],
            "verified": True,
            "verified_at": now(),
            "verify_seconds": verify_seconds,
            "removed": retention.summary(removed),
        }
    )
    # Last: once the proof is written, nobody reads these bytes again to trust them, and retention may take them. A
    # crash before this line repeats the stage.
    store.run.write(part, index)
    events.emit(events.Verified(step=checkpoint.step, bytes=checkpoint.bytes, digest=checkpoint.digest))
    return part


def _mark(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Records the newest checkpoint and the one with the lowest evaluation loss."""
    run = store.run
    before = run.read(Promoted)
    if before and before.newest.step > checkpoint.step:
        return
    losses = store.evaluation_losses(checkpoint)
    measured = (found for found in store.committed() if found.step in losses)
    best = min(measured, key=lambda found: (losses[found.step], found.step), default=None)
    promoted = Promoted(newest=CheckpointRef(step=checkpoint.step, uri=store.uri(checkpoint)))
    if best is not None:
        place = CheckpointRef(step=best.step, uri=store.uri(best), eval_loss=losses[best.step])
        promoted = promoted.model_copy(update={"best": place})
    run.write(promoted)


def read_back(run_uri: str, index: int) -> str:
    """Verifies a chunk's checkpoint, see `promote`, and returns its part of the proof in Markdown."""
    run = Run.open(run_uri)
    try:
        return proof_as_markdown(promote(run, index))
    except DamagedError as error:
        # After the last chunk only: a later one passes over the damaged checkpoint and trains its steps again.
        if index >= run.plan().slots(run.recipe().chunks.spare):
            raise
        run.warn(f"{error} A later chunk makes up for it.")
        return f"# Chunk {index}: not proven\n\n{error}\n\nA later chunk makes up for it.\n"


def promote(run: Run, index: int) -> ProofPart | None:
    """Verifies a chunk's checkpoint, which is before the target after a preemption, and returns its part of the proof.

    None for a chunk preempted before its first checkpoint, and for one before the step at which a fork began.
    `DamagedError` if the store does not hold what was committed.
    """
    started = time.time()
    plan, recipe = run.plan(), run.recipe()
    store, target = CheckpointStore.of(run, recipe), plan.target(index)
    attempts = run.attempts(index)
    part = _gone_since(store, index, target, is_last=index >= plan.slots(recipe.chunks.spare))
    if part is None and target >= run.began():
        checkpoint = _left_by(store, target, attempts[-1] if attempts else None)
        if checkpoint:
            part = prove(store, checkpoint, index, attempts, keep=recipe.chunks.keep, targets=plan.targets)
    run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
    return part


def _gone_since(store: CheckpointStore, index: int, target: int, *, is_last: bool) -> ProofPart | None:
    """Returns an earlier run's part of the proof if the checkpoint has gone since.

    Retention has taken it, or it is lost while Kubeflow's cache skips the chunk; a later chunk makes up for it.
    """
    before = store.run.read(ProofPart, index)
    if before is None or before.step != target or store.read(target) is not None:
        return None
    later = any(checkpoint.step > target for checkpoint in store.committed())
    if not later and not is_last:
        store.run.warn(f"{store.storage.uri(store.prefix(target))} is no longer there; a later chunk makes up for it.")
    return before if later or not is_last else None


def _left_by(store: CheckpointStore, target: int, attempt: ChunkRecord | None) -> Checkpoint | None:
    outcome = attempt.outcome if attempt else None
    checkpoint = store.read(attempt.to_step if attempt and outcome in ("partial", "finished") else target)
    if checkpoint is None and attempt and outcome == "already_done":
        # Early stopping ended the run before the target, or a trial that caught up has only a later checkpoint.
        reached = store.read(attempt.to_step)
        checkpoint = reached if reached and (reached.meta.finished or store.run.read(TrialInfo)) else None
    if checkpoint is not None:
        return checkpoint
    if outcome != "partial":
        raise DamagedError(f"{store.storage.uri(store.prefix(target))}: the chunk left no checkpoint there.")
    # The next chunk may have passed it and let retention take it. None: preempted before the first checkpoint.
    return store.newest()


def proof_as_markdown(part: ProofPart | None) -> str:
    """Returns a chunk's part of the proof in Markdown."""
    if part is None:
        return (
            "# Resume proof\n\nThis chunk left no checkpoint: it was preempted before the first, and the "
            "next resumes, or the run is a fork that began after it.\n"
        )
    parent = f"step {part.parent_step}, `{part.parent_digest}`" if part.parent_digest else "the start model"
    if fork := part.forked_from:
        parent = f"`{fork.run_uri}` at step {fork.step}, whose fork this run is"
    work = part.work
    facts = [
        f"own digest: `{part.digest}`",
        f"continues: {parent}",
        f"chain: `{part.chain}`",
        f"level: **{part.level}**",
        f"read back and verified: {part.bytes:,} bytes in {part.verify_seconds or 0.0:.1f} s, at `{part.uri}`",
        f"goodput since the run began: {work.goodput:.0%} of the time went into steps that are kept",
        f"work lost to preemption so far: {work.lost_steps} steps, about {work.lost_seconds:.0f} s",
        f"processes that were lost and started again in their pod so far: {work.restarts}",
    ]
    if part.hooks:
        facts += [f"state of `{name}` is carried, `{digest}`" for name, digest in part.hooks.carried.items()]
        facts += [f"**state of `{name}` is not carried**: {why}" for name, why in part.hooks.lost.items()]
    phases = [phase for phase in PHASES_OF_A_CHUNK if any(phase in attempt.seconds for attempt in part.attempts)]
    rows = [
        (
            f"{attempt.from_step} → {attempt.to_step}",
            attempt.outcome,
            *(f"{attempt.seconds.get(phase, 0.0):.1f}" for phase in phases),
            f"{attempt.bytes_received / 1e6:.1f}",
            f"{attempt.bytes_sent / 1e6:.1f}",
            f"{(attempt.peak_bytes or 0) / 1e6:.0f}",
        )
        for attempt in part.attempts
    ]
    sections = [
        f"# Resume proof, chunk {part.chunk}: step {part.step}",
        "\n".join(f"- {fact}" for fact in facts),
        *(f"> **Passed over:** {reason}" for reason in part.skipped),
        _table(["restored in this chunk", "compared before the first step"], (part.checked or {}).items()),
        _table(["steps", "outcome", *(f"{phase}, s" for phase in phases), "MB in", "MB out", "peak MB"], rows),
        _table(["fingerprint", ""], part.fingerprint.to_json().items()),
        _table(
            ["step removed by retention", "because", "bytes"],
            [(entry.step, entry.reason, f"{entry.bytes:,}") for entry in part.removed],
        ),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])
