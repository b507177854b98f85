"""The resume proof: what each checkpoint says of the state it continues, part by part."""

from __future__ import annotations

from typing import Any

from components.shared.checkpoints.store import Checkpoint, CheckpointStore


def proof_part(store: CheckpointStore, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what a checkpoint proves: whose state it continues, what was compared, and on what machine."""
    meta = checkpoint.meta
    return {
        "step": checkpoint.step,
        "digest": meta.digest,
        "parent_step": meta.parent.step if meta.parent else None,
        "parent_digest": meta.parent.digest if meta.parent else None,
        "chain": meta.chain,
        "level": meta.restored.level,
        "checked": meta.restored.checked,
        "restored_step": meta.restored.step,
        "skipped": meta.restored.skipped,
        "uri": store.uri(checkpoint),
        "bytes": checkpoint.bytes,
        "fingerprint": meta.fingerprint.to_json(),
        "seconds": meta.seconds,
        "moved": meta.moved.to_json(),
        "work": meta.work.to_json(),
        "forked_from": meta.forked_from.to_json() if meta.forked_from else None,
    }
