"""The resume proof: what each checkpoint says of the state it continues, part by part."""

from __future__ import annotations

from typing import Any

from components.shared.checkpoint_store import CheckpointStore
from components.shared.store.bundles import Manifest


def proof_part(store: CheckpointStore, step: int, manifest: Manifest) -> dict[str, Any]:
    """Returns what a checkpoint proves: whose state it continues, what was compared, and on what machine."""
    meta = manifest.meta
    return {
        "step": step,
        "digest": meta["digest"],
        "parent_step": meta["parent"]["step"] if meta["parent"] else None,
        "parent_digest": meta["parent"]["digest"] if meta["parent"] else None,
        "chain": meta["chain"],
        "level": meta["restored"]["level"],
        "checked": meta["restored"]["checked"],
        "restored_step": meta["restored"]["step"],
        "skipped": meta["restored"]["skipped"],
        "uri": store.uri(step, manifest),
        "bytes": manifest.bytes,
        "fingerprint": meta["fingerprint"],
        "seconds": meta["seconds"],
        "moved": meta["moved"],
        "work": meta["work"],
        "forked_from": meta.get("forked_from"),
    }
