"""The resume proof: a checkpoint read back against the state that it continues, and the proof in Markdown."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from baton import events
from baton.checkpoint import retention
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.recipe.run import Keep
from baton.runs.documents import PHASES_OF_A_CHUNK, CheckpointRef, ChunkAttempt, ChunkRecord, Promoted, ProofPart
from baton.runs.run import now

# --- The resume proof: what each checkpoint says of the state it continues, part by part.


FIGURES = frozenset(ChunkAttempt.model_fields)


def proof_part(store: CheckpointStore, checkpoint: Checkpoint) -> ProofPart:
    """Returns what a checkpoint proves: whose state it continues, what was compared, and on what machine."""
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
    """Reads a chunk's checkpoint back, marks newest and best, applies retention, and writes the chunk's proof.

    Args:
        store: The run's checkpoints.
        checkpoint: The one that the chunk left.
        index: Number of the chunk.
        attempts: All attempts at it.
        keep: Which checkpoints stay.
        targets: Steps at which the run's chunks end.

    Raises:
        RewritableDamageError: what is in the store is not what was committed.
    """
    started, run = time.time(), store.run
    store.require_whole(checkpoint, store.verify(checkpoint))
    verify_seconds = time.time() - started
    # Before retention, which keeps the newest checkpoint that was read back.
    _mark(store, checkpoint)
    removed = retention.tidy(store, keep, targets=targets)
    part = proof_part(store, checkpoint).model_copy(
        update={
            "chunk": index,
            "attempts": [_figures(attempt) for attempt in attempts],
            "verified": True,
            "verified_at": now(),
            "verify_seconds": verify_seconds,
            "removed": retention.summary(removed),
        }
    )
    # Last: from here on nobody reads these bytes again to trust them, and retention need not keep them for a retry of
    # this stage.
    run.write(part, index)
    events.emit(events.Verified(step=checkpoint.step, bytes=checkpoint.bytes, digest=checkpoint.digest))
    return part


def _figures(record: ChunkRecord) -> ChunkAttempt:
    """Returns what an attempt cost, without what the proof says already."""
    return ChunkAttempt.model_validate({name: value for name, value in record.to_json().items() if name in FIGURES})


def _mark(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Writes which checkpoint is newest and which has the lowest evaluation loss so far."""
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


# --- A chunk's part of the resume proof, as the Kubeflow page shows it.


def proof_as_markdown(part: ProofPart | None) -> str:
    """Returns a chunk's part of the proof in Markdown.

    Args:
        part: What `promote` returned.
    """
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
