"""An attempt that is killed leaves no record: the next one records it, and shows the steps that are repeated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from baton import events
from baton.pages.collect import collect
from baton.pages.run_page import kills_note, read_proof
from baton.runs.documents import Progress
from baton.train.chunk import Ending, record_attempt
from tests.support import tiny
from tests.train.resuming import Chunks

TARGETS = (4, 8)


def _dies_at(step: int) -> type[TrainerCallback]:
    class Dying(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if step and state.global_step == step:
                raise KeyboardInterrupt

    return Dying


# Chunk and step of each kill → records of killed attempts (chunk, from, to, lost), words shown, and checkpoints proven.
KILLS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int, int, int]], list[str], list[int]]] = {
    "none": ([], [], [], []),
    "after a checkpoint within a chunk": (
        [(2, 7)],
        [(2, 4, 7, 1)],
        ["resumed from step 6; step 7 is repeated"],
        [6],
    ),
    "at once after a checkpoint within a chunk": ([(2, 6)], [(2, 4, 6, 0)], ["resumed from step 6"], [6]),
    "before a chunk's first checkpoint": (
        [(2, 5)],
        [(2, 4, 5, 1)],
        ["resumed from step 4; step 5 is repeated"],
        [4],
    ),
    "before any checkpoint": (
        [(1, 1)],
        [(1, 0, 1, 1)],
        ["started again from the beginning; step 1 is repeated"],
        [],
    ),
    "twice after the same checkpoint": (
        [(2, 7), (2, 7)],
        [(2, 4, 7, 1), (2, 6, 7, 1)],
        ["resumed from step 6; step 7 is repeated"] * 2,
        [6],
    ),
    "in each chunk": (
        [(1, 3), (2, 7)],
        [(1, 0, 3, 1), (2, 4, 7, 1)],
        ["resumed from step 2; step 3 is repeated", "resumed from step 6; step 7 is repeated"],
        [2, 6],
    ),
}


@pytest.mark.parametrize(("kills", "records", "words", "proven"), KILLS.values(), ids=KILLS)
def test_the_next_attempt_records_a_killed_one(
    kills: Sequence[tuple[int, int]],
    records: Any,
    words: list[str],
    proven: list[int],
    tiny_base: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"max_steps": 8, "learning_rate": 0.01, "log_every": 1, "lr_scheduler": "linear"}
    kept = {"keep": {"last": 1}, "wait_for_commit": True, "checkpoint_every": 2}
    recipe = tiny.recipe(tiny_base, training=settings, chunks=kept, evaluation={"samples": 0})
    chunks = Chunks(recipe, tmp_path, "killed", TARGETS)
    chunks.run.put("plan.json", chunks.plan.to_json())
    heard: list[events.Event] = []
    monkeypatch.setattr(events, "_hearers", [heard.append])
    for index, target in enumerate(TARGETS, 1):
        for step in [step for chunk, step in kills if chunk == index]:
            with pytest.raises(KeyboardInterrupt):
                chunks.train(index, callbacks=(_dies_at(step),))
            chunks.run.write(Progress(step=step, chunk=index, seconds_per_step=2.0))  # noted each second, or ten
        committer = chunks.train(index, callbacks=(_dies_at(0),))
        record_attempt(chunks.context(index), Ending.DONE, committer.start_step, target, committer.accounting.figures())

    killed = [each for each in chunks.run.attempts() if each.outcome == "killed"]
    assert [(each.chunk, each.from_step, each.to_step, each.lost_steps) for each in killed] == records
    assert all(each.lost_seconds == 2.0 * each.lost_steps <= each.seconds["train"] for each in killed)
    resumed = [event.text for event in heard if isinstance(event, events.TrainingResumed)]
    assert [text for text in resumed if text != "resumed from step 4"] == words
    assert [part.step for part in chunks.run.restored_parts()] == proven

    report = collect(chunks.run)
    assert kills_note(report).count("Killed after step") == len(kills)
    rows = {row.part.step: row for row in read_proof(report).rows}
    assert all(rows[step].part.verified and not rows[step].problems for step in proven)
    assert [each.outcome for each in report.chunk_attempts].count("killed") == len(kills)


def test_steps_of_a_lost_checkpoint_are_repeated_after_no_kill(tiny_base: str, tmp_path: Path) -> None:
    settings = {"max_steps": 8, "learning_rate": 0.01, "log_every": 1, "lr_scheduler": "linear"}
    kept = {"keep": {"last": 3}, "wait_for_commit": True}
    recipe = tiny.recipe(tiny_base, training=settings, chunks=kept, evaluation={"samples": 0})
    chunks = Chunks(recipe, tmp_path, "damaged", TARGETS)
    for index, target in enumerate(TARGETS, 1):
        committer = chunks.train(index)
        record_attempt(chunks.context(index), Ending.DONE, committer.start_step, target, committer.accounting.figures())
    chunks.run.write(Progress(step=8, chunk=2, seconds_per_step=2.0))
    for path in Path(chunks.run.storage.key(chunks.store.prefix(8))).rglob("optimizer.pt"):
        path.write_bytes(b"damaged")
    assert chunks.train(2).start_step == 4
    assert [each.outcome for each in chunks.run.attempts()] == ["done", "done"]
    assert chunks.run.restored_parts() == []
