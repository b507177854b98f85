"""A world of one rank agrees with itself, and its checkpoints say what they always said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.checkpoint.staging import Staging
from baton.checkpoint.store import CheckpointMeta, Restoration
from baton.recipe import load
from baton.recipe.run import Preemption
from baton.runs.documents import OwnState
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train.checkpointer import Checkpointer, Committer, StepDecision
from baton.train.context import TrainContext
from baton.train.distributed import Watchdog
from baton.train.preemption import PreemptionWatch
from tests.train.chunks import first_chunk

RECIPE = {"name": "one", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}}


@pytest.fixture
def context(tmp_path: Path) -> TrainContext:
    run = Run(Storage(str(tmp_path / "store")), "one")
    run.create(load.validate(RECIPE, origin="one"))
    return first_chunk(run)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[PreemptionWatch]:
    with PreemptionWatch(Preemption(notice_file=str(tmp_path / "leave")), interval=0.02) as watch:
        yield watch


@pytest.fixture
def checkpointer(context: TrainContext, watch: PreemptionWatch) -> Iterator[Checkpointer]:
    with Staging() as staging:
        yield Checkpointer(context, staging, watch, Watchdog())


def test_it_stops_once_there_is_a_notice(checkpointer: Checkpointer, watch: PreemptionWatch, tmp_path: Path) -> None:
    assert not checkpointer.is_preempted()
    assert checkpointer.agree(1, due_by_time=True) == StepDecision()
    (tmp_path / "leave").touch()
    until = time.monotonic() + 10
    while watch.notice is None and time.monotonic() < until:
        time.sleep(0.01)
    assert checkpointer.agree(2, due_by_time=False) == StepDecision(stop=True)
    assert checkpointer.is_preempted()


def test_it_writes_where_all_fits(checkpointer: Checkpointer) -> None:
    pending = next(checkpointer.stage(3, 10))
    assert Path(pending.folder).parent.is_dir()
    assert (pending.step, pending.writer) == (3, None)


def _state(finished: bool = False) -> CheckpointMeta:
    return CheckpointMeta(
        digest="s", state={"weights": "w", "state": "s"}, restored=Restoration(checked=None), finished=finished,
        trainable_parameters=3, hooks=OwnState(),
    )  # fmt: skip


def test_a_manifest_has_the_keys_of_old_and_what_it_was_written_with(context: TrainContext) -> None:
    committer = Committer(context, None, level="bitwise", skipped=[])
    context.run.storage.sent, context.run.storage.received = 3, 5
    meta = committer.meta(_state(), trained_for=2.0).to_json()
    assert meta["moved"] == {"sent": 3, "received": 5}
    assert set(meta) == {
        *("digest", "state", "parent", "chain", "restored", "identity", "finished", "fingerprint"),
        *("trainable_parameters", "chunk", "created", "seconds", "moved", "work", "made", "hooks"),
    }
    assert meta["hooks"] == {}
    assert meta["restored"] == {"step": 0, "checked": None, "level": "bitwise", "skipped": []}
    assert set(meta["work"]) == {"started", "trained_seconds", "goodput", "lost_steps", "lost_seconds", "restarts"}
    assert meta["work"]["trained_seconds"] == 2.0
    assert meta["identity"] == "made of this"


@pytest.mark.parametrize("finished", [True, False])
def test_a_checkpoint_says_that_the_run_ended_only_where_it_did(finished: bool, context: TrainContext) -> None:
    """One that is still on its way when a later evaluation ends the run is not the run's last."""
    committer = Committer(context, None, level="bitwise", skipped=[])
    assert committer.meta(_state(finished), 0.0).finished is finished
