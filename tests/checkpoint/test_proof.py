"""What a checkpoint's part of the resume proof says, entry by entry."""

from __future__ import annotations

from typing import Any

import pytest

from baton.checkpoint.proof import proof_as_markdown, proof_part
from baton.checkpoint.store import CheckpointMeta, Parent, Restoration
from baton.runs.documents import ChunkAttempt, ForkOrigin, OwnState, ProofPart, Removed, RunCost, Transfer
from baton.runs.versions import Fingerprint


def test_each_entry_is_the_manifests(in_a_folder: Any) -> None:
    meta = CheckpointMeta(
        digest="d",
        parent=Parent(step=5, digest="before"),
        chain="c",
        restored=Restoration(step=4, checked={"rng": "match"}, level="consistent", skipped=["step 5 is damaged"]),
        fingerprint=Fingerprint(torch="2"),
        seconds={"train": 1.5},
        hooks=OwnState(carried={"own.py:n": "h"}),
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
        "hooks": {"carried": {"own.py:n": "h"}},
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


FULL = ProofPart(
    step=12,
    digest="d12",
    parent_step=8,
    parent_digest="d8",
    chain="c12",
    level="consistent",
    checked={"weights": "match", "rng | own": "absent"},
    restored_step=8,
    skipped=["step 10 is damaged"],
    hooks=OwnState(carried={"own.py:n": "h1"}, lost={"own.py:it": "it was removed"}),
    uri="store/step-12",
    bytes=1234567,
    fingerprint=Fingerprint(device="cpu", threads=2),
    work=RunCost(goodput=0.756, lost_steps=3, lost_seconds=41.6, restarts=2),
    chunk=3,
    attempts=[
        ChunkAttempt(
            outcome="partial",
            from_step=8,
            to_step=10,
            seconds={"start": 1.25, "train": 20.0},
            bytes_received=1_500_000,
            bytes_sent=2_340_000,
            peak_bytes=98_700_000,
        ),
        ChunkAttempt(outcome="done", from_step=10, to_step=12, seconds={"upload": 0.5, "other": 9.0}),
    ],
    verify_seconds=1.26,
    removed=[Removed(step=4, reason="not among those to keep", bytes=7654321)],
)
FIRST = ProofPart(step=3, digest="d3", uri="store/step-3")
PAGES: dict[str, tuple[ProofPart | None, str]] = {
    "with all there can be": (
        FULL,
        """# Resume proof, chunk 3: step 12

- own digest: `d12`
- continues: step 8, `d8`
- chain: `c12`
- level: **consistent**
- read back and verified: 1,234,567 bytes in 1.3 s, at `store/step-12`
- goodput since the run began: 76% of the time went into steps that are kept
- work lost to preemption so far: 3 steps, about 42 s
- processes that were lost and started again in their pod so far: 2
- state of `own.py:n` is carried, `h1`
- **state of `own.py:it` is not carried**: it was removed

> **Passed over:** step 10 is damaged

| restored in this chunk | compared before the first step |
|---|---|
| weights | match |
| rng \\| own | absent |

| steps | outcome | start, s | train, s | upload, s | MB in | MB out | peak MB |
|---|---|---|---|---|---|---|---|
| 8 → 10 | partial | 1.2 | 20.0 | 0.0 | 1.5 | 2.3 | 99 |
| 10 → 12 | done | 0.0 | 0.0 | 0.5 | 0.0 | 0.0 | 0 |

| fingerprint |  |
|---|---|
| device | cpu |
| threads | 2 |

| step removed by retention | because | bytes |
|---|---|---|
| 4 | not among those to keep | 7,654,321 |
""",
    ),
    "of the first chunk": (
        FIRST,
        """# Resume proof, chunk None: step 3

- own digest: `d3`
- continues: the start model
- chain: ``
- level: **bitwise**
- read back and verified: 0 bytes in 0.0 s, at `store/step-3`
- goodput since the run began: 0% of the time went into steps that are kept
- work lost to preemption so far: 0 steps, about 0 s
- processes that were lost and started again in their pod so far: 0
""",
    ),
    "of no checkpoint": (
        None,
        "# Resume proof\n\nThis chunk left no checkpoint: it was preempted before the first, and the "
        "next resumes, or the run is a fork that began after it.\n",
    ),
}
"""Part of the proof → its page, to the letter."""


@pytest.mark.parametrize(("part", "page"), PAGES.values(), ids=PAGES)
def test_a_part_of_the_proof_is_a_page(part: ProofPart | None, page: str) -> None:
    assert proof_as_markdown(part) == page


def test_a_forks_first_part_names_the_run_that_it_left() -> None:
    origin = ForkOrigin(run_uri="store/runs/parent", step=8, digest="d8")
    page = proof_as_markdown(FULL.model_copy(update={"forked_from": origin}))
    assert "- continues: `store/runs/parent` at step 8, whose fork this run is\n" in page
    assert "step 8, `d8`" not in page
