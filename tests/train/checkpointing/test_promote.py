"""What the checkpoint stage reads back behind a chunk that trained nothing: a trial that has caught up with others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.checkpoint.proof import promote, proof_part, read_back
from baton.checkpoint.store import CheckpointMeta, CheckpointStore, Restoration
from baton.errors import DamagedError
from baton.recipe import load
from baton.runs.documents import ChunkAttempt, ForkNote, Promoted, ProofPart, StageRecord
from baton.runs.outcomes import TrialInfo
from baton.runs.plan import Plan, make_plan
from baton.runs.run import Run, now
from baton.store.storage import Storage

RECIPE = {
    "name": "caught-up",
    "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"train": {"vocab_size": 300}}},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 12},
    "chunks": {"count": 4},
}
REACHED = 9
"""Step of the one checkpoint there is: the end of chunk 3."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has come to chunk 3 in one go, and then was asked for chunk 2."""
    run = Run(Storage(str(tmp_path / "store")), "s-t000")
    recipe = load.validate(RECIPE, origin="test")
    run.create(recipe)
    plan: Plan = make_plan(recipe, 120)
    assert plan.targets == (3, 6, REACHED, 12)
    run.put("plan.json", plan.to_json())
    _commit(run, tmp_path, REACHED, CheckpointMeta(digest="d9", restored=Restoration(step=3)))
    return run


def _commit(run: Run, folder: Path, step: int, meta: CheckpointMeta, log: Sequence[dict[str, float]] = ()) -> None:
    files = folder / str(step)
    files.mkdir(parents=True)
    (files / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    store = CheckpointStore(run)
    writer = store.open_writer(step)
    writer.send(str(files))
    store.commit(step, writer, meta)


def _attempt(run: Run, outcome: str) -> None:
    run.record("train-chunk-002", {"chunk": 2, "from_step": REACHED, "to_step": REACHED, "outcome": outcome})


def test_a_trial_that_has_caught_up_is_verified_where_it_is(run: Run) -> None:
    run.put(TrialInfo.NAME, {"sweep": "s", "id": "t000"})
    _attempt(run, "already_done")
    part = promote(run, 2)
    assert part is not None
    assert (part.chunk, part.step, part.digest, part.verified) == (2, REACHED, "d9", True)
    assert run.require("proof/chunk-002.json")["step"] == REACHED
    assert run.require("promoted.json")["newest"]["step"] == REACHED


@pytest.mark.parametrize("outcome", ["finished", "already_done"])
def test_a_run_that_early_stopping_ended_is_verified_where_it_ended(outcome: str, run: Run, tmp_path: Path) -> None:
    _commit(run, tmp_path, 11, CheckpointMeta(digest="d11", finished=True))
    run.record("train-chunk-004", {"chunk": 4, "from_step": REACHED, "to_step": 11, "outcome": outcome})
    part = promote(run, 4)
    assert part is not None
    assert (part.step, part.digest) == (11, "d11")


@pytest.mark.parametrize(
    ("is_trial", "outcome"),
    [pytest.param(False, "already_done", id="no-trial"), pytest.param(True, "done", id="trained")],
)
def test_any_other_chunk_that_left_no_checkpoint_is_an_error(run: Run, is_trial: bool, outcome: str) -> None:
    if is_trial:
        run.put(TrialInfo.NAME, {"sweep": "s", "id": "t000"})
    _attempt(run, outcome)
    with pytest.raises(DamagedError, match=r"step-00000006: the chunk left no checkpoint there"):
        promote(run, 2)


GONE: dict[str, tuple[int, int, int, bool, bool]] = {
    "a later one is here": (2, 6, 0, True, False),
    "a later one is here, after the last chunk": (5, 12, 13, True, False),
    "none is later": (3, 12, 0, True, True),
    "none is later, after the last chunk": (5, 12, 0, False, False),
    "read back at another step": (2, 5, 0, False, False),
}
"""Place of a checkpoint that has gone → chunk, the step that it was read back at, a later checkpoint beside those of
the run, and whether the earlier part of the proof holds, and a warning is given."""


@pytest.mark.parametrize(("index", "step", "later", "holds", "warns"), GONE.values(), ids=GONE)
def test_a_checkpoint_that_has_gone_since_it_was_read_back(
    index: int, step: int, later: int, holds: bool, warns: bool, run: Run, tmp_path: Path
) -> None:
    recipe = load.validate({**RECIPE, "chunks": {"count": 4, "extra": 1}}, origin="test")
    run = Run(run.storage, "gone")
    run.create(recipe)
    targets = [3, 6, step, 12] if index == 3 else [3, 6, REACHED, 12]
    run.put("plan.json", {**make_plan(recipe, 120).to_json(), "targets": targets})
    _commit(run, tmp_path / "of-gone", REACHED, CheckpointMeta(digest="d9"))
    if later:
        _commit(run, tmp_path / "of-gone", later, CheckpointMeta(digest="later"))
    run.write(ProofPart(step=step, digest="before"), index)
    run.record(f"train-chunk-{index:03d}", {"chunk": index, "from_step": 0, "to_step": step, "outcome": "done"})
    if holds:
        assert promote(run, index) == ProofPart(step=step, digest="before")
    else:
        with pytest.raises(DamagedError, match="the chunk left no checkpoint there"):
            promote(run, index)
    told = [warning.text for warning in run.warnings()]
    assert (
        told
        == [
            f"{run.storage.uri(run.path(f'checkpoints/step-{step:08d}'))} is no longer there; a later chunk "
            "makes up for it."
        ]
        * warns
    )
    assert len(run.storage.list(run.path("records"))) == 1 + holds


def test_a_checkpoint_that_is_here_is_read_back_again(run: Run, tmp_path: Path) -> None:
    run.write(ProofPart(step=REACHED, digest="before"), 3)
    figures = {"from_step": 3, "to_step": REACHED, "seconds": {"train": 2.0}, "save_stalls": [0.5], "peak_bytes": 7}
    for outcome in ("partial", "done"):
        run.record("train-chunk-003", {"chunk": 3, "outcome": outcome, "tokens": 5, "at": outcome, **figures})
    for step in (1, 2):
        _commit(run, tmp_path, step, CheckpointMeta(digest=f"d{step}"))
    before = now()
    part = promote(run, 3)
    assert part
    store = CheckpointStore(run)
    checkpoint = store.newest()
    assert checkpoint
    fixed = {"chunk": 3, "verified": True, "verified_at": part.verified_at, "verify_seconds": part.verify_seconds}
    assert part.model_copy(update={"attempts": [], "removed": []}) == proof_part(store, checkpoint).model_copy(
        update=fixed
    )
    assert part.attempts == [ChunkAttempt(outcome=outcome, **figures) for outcome in ("partial", "done")]
    assert [(entry.step, entry.bytes) for entry in part.removed] == [(1, 19)]
    assert before <= str(part.verified_at) <= now()
    assert 0 < float(part.verify_seconds or 0) < 60
    assert run.need(ProofPart, 3) == part


def test_the_record_of_the_stage_names_its_chunk(run: Run) -> None:
    assert promote(run, 3)
    (record,) = run.read_all(StageRecord, "records", "checkpoint-")
    assert (record.stage, record.chunk) == ("checkpoint-003", 3)
    assert 0 < record.total < 60


@pytest.mark.parametrize(("reached", "expected"), [(0, REACHED), (REACHED, REACHED), (5, REACHED)])
def test_a_chunk_that_was_preempted_is_verified_where_it_was_or_by_the_newest(
    reached: int, expected: int, run: Run
) -> None:
    run.record("train-chunk-004", {"chunk": 4, "from_step": 0, "to_step": reached, "outcome": "partial"})
    part = promote(run, 4)
    assert part
    assert (part.step, part.chunk, part.verified) == (expected, 4, True)


def test_a_chunk_that_was_preempted_before_the_first_checkpoint_has_no_part(run: Run) -> None:
    shutil.rmtree(run.storage.key(run.path("checkpoints")))
    run.record("train-chunk-001", {"chunk": 1, "from_step": 0, "to_step": 0, "outcome": "partial"})
    assert promote(run, 1) is None
    assert read_back(run.uri, 1).startswith("# Resume proof\n\nThis chunk left no checkpoint")


@pytest.mark.parametrize(("began", "has_part"), [(9, True), (10, False)])
def test_a_chunk_before_a_warm_forks_begin_has_no_part(began: int, has_part: bool, run: Run) -> None:
    run.write(ForkNote(parent="store/runs/parent", step=began, warm=True))
    assert (promote(run, 3) is not None) == has_part


LOSSES = [(3, 1.5), (6, 0.5), (9, 0.75), (12, 0.5)]


def test_the_newest_and_the_best_are_marked_and_none_older_takes_their_place(run: Run, tmp_path: Path) -> None:
    log = [{"step": step, "eval_loss": loss} for step, loss in LOSSES]
    for number, (step, _) in enumerate(LOSSES, 1):
        if step != REACHED:
            _commit(run, tmp_path, step, CheckpointMeta(digest=f"d{step}"), log[:number])
    store = CheckpointStore(run)
    for index, best in ((1, 3), (2, 6), (4, 6), (2, 6)):
        assert promote(run, index)
        promoted = run.need(Promoted)
        assert promoted.best
        assert (promoted.best.step, promoted.best.eval_loss) == (best, dict(LOSSES)[best])
        (checkpoint,) = (each for each in store.committed() if each.step == best)
        assert promoted.best.uri == store.uri(checkpoint)
    newest = store.newest()
    assert newest
    assert (promoted.newest.step, promoted.newest.uri) == (12, store.uri(newest))


def test_damage_stops_no_chunk_but_is_an_error_after_the_last(run: Run, tmp_path: Path) -> None:
    _commit(run, tmp_path, 12, CheckpointMeta(digest="d12"))
    for index, step in ((3, REACHED), (4, 12)):
        run.record(f"train-chunk-{index:03d}", {"chunk": index, "from_step": 6, "to_step": step, "outcome": "done"})
        (checkpoint,) = (found for found in CheckpointStore(run).committed() if found.step == step)
        Path(CheckpointStore(run).uri(checkpoint), "trainer_state.json").write_text("other bytes")
    told = read_back(run.uri, 3)
    assert told.startswith("# Chunk 3: not proven")
    assert "trainer_state.json" in told
    assert run.path("proof/chunk-003.json") not in run.storage.list(run.path("proof"))
    assert [found.step for found in CheckpointStore(run).whole()] == []  # nobody restores it
    with pytest.raises(DamagedError, match=r"trainer_state\.json"):
        read_back(run.uri, 4)
