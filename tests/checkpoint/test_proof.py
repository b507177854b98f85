"""What a checkpoint's part of the resume proof says, entry by entry."""

from __future__ import annotations

from typing import Any

from baton.checkpoint.proof import proof_part
from baton.checkpoint.store import CheckpointMeta, Parent, Restoration
from baton.runs.documents import ForkOrigin, RunCost, Transfer
from baton.runs.versions import Fingerprint


def test_each_entry_is_the_manifests(in_a_folder: Any) -> None:
    meta = CheckpointMeta(
        digest="d",
        parent=Parent(step=5, digest="before"),
        chain="c",
        restored=Restoration(step=4, checked={"rng": "match"}, level="consistent", skipped=["step 5 is damaged"]),
        fingerprint=Fingerprint(torch="2"),
        seconds={"train": 1.5},
        moved=Transfer(sent=3, received=4),
        work=RunCost(trained_seconds=2.0),
        forked_from=ForkOrigin(run_uri="parent", step=4, digest="of it", changed={}),
    )
    checkpoint, _ = in_a_folder.store.commit(7, in_a_folder.send(7), meta)
    assert proof_part(in_a_folder.store, checkpoint).to_json() == {
        "step": 7,
        "digest": "d",
        "parent_step": 5,
        "parent_digest": "before",
        "chain": "c",
        "level": "consistent",
        "checked": {"rng": "match"},
        "hooks": None,
        "restored_step": 4,
        "skipped": ["step 5 is damaged"],
        "uri": in_a_folder.store.uri(checkpoint),
        "bytes": checkpoint.bytes,
        "fingerprint": {"torch": "2"},
        "seconds": {"train": 1.5},
        "moved": {"sent": 3, "received": 4},
        "work": {"trained_seconds": 2.0},
        "forked_from": {"run_uri": "parent", "step": 4, "digest": "of it", "changed": {}},
    }
