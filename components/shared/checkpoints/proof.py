"""The resume proof: what each checkpoint says of the state it continues, part by part."""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.components.shared.checkpoints import retention
from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core import events
from baton.components.shared.recipe import Keep
from baton.components.shared.runs.documents.training import Attempt, ChunkRecord, Place, Promoted, ProofPart
from baton.components.shared.runs.run import now

FIGURES = frozenset(Attempt.model_fields)


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
        MarkedError: what is in the store is not what was committed.
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


def _figures(record: ChunkRecord) -> Attempt:
    """Returns what an attempt cost, without what the proof says already."""
    return Attempt.model_validate({name: value for name, value in record.to_json().items() if name in FIGURES})


def _mark(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Writes which checkpoint is newest and which has the lowest evaluation loss so far."""
    run = store.run
    before = run.read(Promoted)
    if before and before.newest.step > checkpoint.step:
        return
    losses = store.evaluation_losses(checkpoint)
    measured = (found for found in store.committed() if found.step in losses)
    best = min(measured, key=lambda found: (losses[found.step], found.step), default=None)
    promoted = Promoted(newest=Place(step=checkpoint.step, uri=store.uri(checkpoint)))
    if best is not None:
        place = Place(step=best.step, uri=store.uri(best), eval_loss=losses[best.step])
        promoted = promoted.model_copy(update={"best": place})
    run.write(promoted)
