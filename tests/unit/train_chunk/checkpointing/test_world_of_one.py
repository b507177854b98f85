"""A world of one rank agrees with itself, and its checkpoints say what they always said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.checkpoint.staging import Staging
from baton.recipe import load
from baton.recipe.run import Preemption
from baton.runs.documents import RunCost
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train.checkpointer import Capture, Checkpointer, Decision, Lineage, Services
from baton.train.context import TrainContext
from baton.train.distributed.preemption import PreemptionWatch
from baton.train.distributed.watchdog import NullWatchdog
from tests.unit.train_chunk.chunks import first_chunk

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
def manager(context: TrainContext, watch: PreemptionWatch) -> Iterator[Checkpointer]:
    with Staging() as staging:
        services = Services(context=context, staging=staging, watch=watch, watchdog=NullWatchdog())
        yield Checkpointer(services)


def test_it_leaves_once_there_is_a_notice(manager: Checkpointer, watch: PreemptionWatch, tmp_path: Path) -> None:
    assert not manager.leaves_at_once()
    assert manager.agree(is_late=True) == Decision(leave=False, is_late=False, is_free=False)
    (tmp_path / "leave").touch()
    until = time.monotonic() + 10
    while watch.notice is None and time.monotonic() < until:
        time.sleep(0.01)
    assert manager.agree(is_late=False) == Decision(leave=True, is_late=False, is_free=False)
    assert manager.leaves_at_once()


def test_it_writes_where_all_fits(manager: Checkpointer) -> None:
    place = next(manager.places(10))
    assert Path(place.folder).is_dir()
    assert place.send is None


def _capture(finished: bool) -> Capture:
    return Capture(
        step=1,
        folder="",
        digests={"weights": "w", "state": "s"},
        wanted=False,
        finished=finished,
        checked={},
        trainable_parameters=3,
    )


def test_a_manifest_has_the_keys_of_old_and_what_it_was_written_with(context: TrainContext) -> None:
    lineage = Lineage(context, None, "bitwise", [])
    work = RunCost(started=1.0, trained_seconds=2.0, goodput=0.5, lost_steps=0, lost_seconds=0.0)
    meta = lineage.meta(_capture(finished=False), work).to_json()
    assert set(meta) == {
        *("digest", "state", "parent", "chain", "restored", "identity", "finished", "fingerprint"),
        *("trainable_parameters", "chunk", "created", "seconds", "moved", "work", "made", "hooks"),
    }
    assert meta["hooks"] == {}
    assert meta["restored"] == {"step": 0, "checked": None, "level": "bitwise", "skipped": []}
    assert meta["work"] == {
        "started": 1.0,
        "trained_seconds": 2.0,
        "goodput": 0.5,
        "lost_steps": 0,
        "lost_seconds": 0.0,
    }
    assert meta["identity"] == "made of this"


@pytest.mark.parametrize("finished", [True, False])
def test_a_checkpoint_says_that_the_run_ended_only_where_it_did(finished: bool, context: TrainContext) -> None:
    """One that is still on its way when a later evaluation ends the run is not the run's last."""
    assert Lineage(context, None, "bitwise", []).meta(_capture(finished), RunCost()).finished is finished
