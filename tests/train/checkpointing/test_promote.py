"""What the checkpoint stage reads back behind a chunk that trained nothing: a trial that has caught up with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.checkpoint.proof import promote, read_back
from baton.checkpoint.store import CheckpointMeta, CheckpointStore, Restoration
from baton.errors import DamagedError
from baton.recipe import load
from baton.runs.outcomes import TrialInfo
from baton.runs.plan import Plan, make_plan
from baton.runs.run import Run
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


def _commit(run: Run, folder: Path, step: int, meta: CheckpointMeta) -> None:
    files = folder / str(step)
    files.mkdir()
    (files / "trainer_state.json").write_text('{"log_history": []}')
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
