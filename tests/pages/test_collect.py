"""What the report gathers of a run whose old checkpoints are gone and whose chunks were cut short."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.pages.collect import collect
from baton.pages.run_page import cost_note, render, tiles
from baton.recipe import load
from baton.runs import objects
from baton.runs.run import Run
from baton.runs.versions import LIBRARIES
from baton.store.storage import Storage

FINGERPRINT = {"device": "cpu", "python": "3.11.7", **dict.fromkeys(LIBRARIES, "1")}
CHECKED = dict.fromkeys(("weights", "optimizer", "rng"), "match")


class History:
    """A run that is written down step by step: chunks to 10, 20 and 30, and two spare ones."""

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        self.folder = folder
        self.run = Run(Storage(str(folder / "store")), "r")
        self.store = CheckpointStore(self.run)
        self.run.create(load.validate(recipe, origin="test"))
        plan = {"rows": 80, "steps_per_epoch": 10, "num_steps": 30, "targets": [10, 20, 30]}
        self.run.put("plan.json", plan)

    def commit(self, step: int, chunk: int, restored: int, parent: int | None = None) -> None:
        """Commit a checkpoint of a process that restored another."""
        local = self.folder / f"local-{step}"
        local.mkdir()
        (local / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": step, "loss": 1.0}]}))
        before = restored if parent is None else parent
        writer = self.store.open_writer(step)
        writer.send(str(local))
        meta = {
            "digest": f"{step:064d}",
            "parent": {"step": before, "digest": f"{before:064d}"} if before else None,
            "chain": f"chain of {step}",
            "restored": {"step": restored, "checked": CHECKED if restored else None, "level": "bitwise", "skipped": []},
            "fingerprint": FINGERPRINT,
            "trainable_parameters": 7,
            "chunk": chunk,
            "seconds": {},
            "moved": {"sent": 1, "received": 1},
            "work": {"goodput": step / 100, "lost_steps": 4, "lost_seconds": 2.0, "started": 0, "trained_seconds": 1},
        }
        self.store.commit(step, writer, CheckpointMeta.model_validate(meta))

    def read_back(self, chunk: int, step: int) -> None:
        """Write the chunk's part of the proof, as the checkpoint stage does."""
        from baton.checkpoint.proof import proof_part

        checkpoint = self.store.read(step)
        assert checkpoint is not None
        part = proof_part(self.store, checkpoint)
        self.run.write(part.model_copy(update={"chunk": chunk, "verified": True, "attempts": []}), chunk)

    def record(self, chunk: int, start: int, end: int, outcome: str = "done", **more: Any) -> None:
        """Keep what an attempt did."""
        seconds = {"start": 1.0, "import": 2.0, "fetch": 0.5, "train": float(end - start), "upload": 0.25}
        document = {"chunk": chunk, "from_step": start, "to_step": end, "outcome": outcome, "seconds": seconds}
        common = {"total_seconds": 4.0, "tokens": 100, "bytes_sent": 1000, "bytes_received": 10}
        self.run.record(f"train-chunk-{chunk:03d}", {**document, **common, **more})

    def take(self, step: int) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(self.run.storage.key(self.store.prefix(step)))


@pytest.fixture
def history(tmp_path: Path, scratch_recipe: dict[str, Any]) -> History:
    """A run of which two chunks were cut short, a spare one finished, and retention has kept the last two."""
    made = History(tmp_path, scratch_recipe)
    made.commit(10, 1, 0)
    made.read_back(1, 10)
    made.record(1, 0, 10, save_stalls=[0.1, 0.2])
    made.commit(15, 2, 10)
    made.read_back(2, 15)
    made.record(2, 10, 15, "partial", save_stalls=[0.9])
    made.commit(22, 3, 15)
    made.read_back(3, 22)
    made.record(3, 15, 22, "partial")
    made.commit(28, 4, 22)
    made.commit(30, 4, 22, parent=28)
    made.read_back(4, 30)
    made.record(4, 22, 30)
    made.record(5, 30, 30, "already_done")
    for step in (10, 15, 22):
        made.take(step)
    return made


def test_the_chain_goes_on_over_checkpoints_that_are_gone(history: History) -> None:
    entries = collect(history.run).proof

    assert [(entry.part.step, entry.gone, entry.part.verified) for entry in entries] == [
        (10, "removed", True),
        (15, "removed", True),
        (22, "removed", True),
        (28, None, False),
        (30, None, True),
    ]
    assert [entry.part.parent_step for entry in entries] == [None, 10, 15, 22, 28]
    assert [entry.part.parent_digest for entry in entries][1:] == [entry.part.digest for entry in entries][:-1]


def test_the_page_claims_what_was_read_back_before_it_went(history: History) -> None:
    page = render(collect(history.run))

    assert "every resume was bit-identical: 1 from chunk to chunk, 2 after an interruption." in page
    assert page.count("files verified, since removed by retention") == 3
    assert ">spare 4</td>" in page


def test_a_checkpoint_that_was_committed_again_is_not_the_one_read_back(history: History) -> None:
    part = history.run.require("proof/chunk-004.json")
    history.run.put("proof/chunk-004.json", {**part, "digest": "f" * 64})

    entry = collect(history.run).proof[-1]

    assert (entry.part.digest, entry.gone, entry.part.verified) == (f"{30:064d}", None, False)


def test_one_found_damaged_is_not_said_to_be_removed(history: History) -> None:
    history.run.storage.write(f"{history.store.prefix(22)}/manifest.json", b"{")

    rows = {entry.part.step: entry.gone for entry in collect(history.run).proof}

    assert rows == {10: "removed", 15: "removed", 22: "damaged", 28: None, 30: None}


def test_spare_chunks_are_listed_where_they_did_something(history: History) -> None:
    chunks = collect(history.run).chunks

    assert [(chunk.index, chunk.spare) for chunk in chunks] == [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert [attempt.outcome for chunk in chunks for attempt in chunk.attempts] == [
        "done",
        "partial",
        "partial",
        "done",
    ]
    assert chunks[0].attempts[0].seconds["import"] == 2.0


def test_what_it_cost(history: History) -> None:
    assert cost_note(collect(history.run)) == (
        "Goodput 30% of the time since the first chunk began, 4 steps lost to interruptions, 5.0 kB sent and "
        "50 B fetched, a save holds training up for 0.2 s (median)."
    )


def test_a_run_that_has_trained_nothing(tmp_path: Path, scratch_recipe: dict[str, Any]) -> None:
    found = collect(History(tmp_path, scratch_recipe).run)

    assert found.proof == []
    assert cost_note(found) == ""
    assert found.state == "interrupted"
    assert "Interrupted: step 0 of 30, chunk 1 of 3." in render(found)


def test_what_the_evaluation_found_has_tiles(history: History) -> None:
    history.run.put(
        "evaluation.json",
        {
            "before": {"loss": 2.0, "perplexity": 7.4},
            "after": {"loss": 1.0, "reward_accuracy": 0.75, "reward_margin": 2.5},
            "samples": [],
            "parameters": 7,
        },
    )
    assert tiles(collect(history.run))[:3] == [
        ("Eval loss", "1", "before: 2"),
        ("Perplexity", "7.40", "before training"),
        ("Reward accuracy", "75%", "margin 2.50 nats"),
    ]


def test_what_shards_took_is_added_up_before_the_stage_that_joins_them(history: History) -> None:
    history.run.record("tokenize", {"seconds": 1.0})
    for index in (1, 2):
        history.run.record(f"{objects.SHARD}-{index:03d}", {"stage": objects.SHARD, "seconds": 4.0})
    assert list(collect(history.run).stages.items())[:2] == [("tokenize shard", 8.0), ("tokenize", 1.0)]
    assert objects.SHARD not in history.run.recorded(datetime.datetime.fromtimestamp(0, datetime.UTC)), (
        "none for the others"
    )
