"""The resume proof: what each checkpoint says of the state it continues, part by part."""

from __future__ import annotations

from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.runs.documents.training import ProofPart


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
        uri=store.uri(checkpoint),
        bytes=checkpoint.bytes,
        fingerprint=meta.fingerprint,
        seconds=meta.seconds,
        moved=meta.moved,
        work=meta.work,
        forked_from=meta.forked_from,
    )
