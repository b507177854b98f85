"""What the first rank notes and decides, and what the ranks agree on."""

from __future__ import annotations

import dataclasses
import io
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from baton.checkpoint.staging import PendingCheckpoint, Staging
from baton.checkpoint.store import CheckpointMeta
from baton.errors import BatonError, UnavailableError
from baton.recipe import load
from baton.recipe.run import Preemption
from baton.runs.documents import Progress, RunCost
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train import checkpointer as committing
from baton.train.checkpointer import Accounting, Checkpointer, Committer, Lost, ProgressNotes, StepDecision
from baton.train.context import Clock
from baton.train.distributed import Ranks, Watchdog
from baton.train.preemption import PreemptionWatch
from tests.train.chunks import first_chunk


class Away(Storage):
    """A store that does not answer while it is away."""

    away = False

    def read(self, path: str) -> bytes:
        if self.away:
            raise UnavailableError("the store does not answer.")
        return super().read(path)

    def write(self, path: str, data: bytes) -> None:
        if self.away:
            raise UnavailableError("the store does not answer.")
        super().write(path, data)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Away(str(tmp_path / "store")), "r")


@pytest.fixture
def notes(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressNotes]:
    """Notes of chunk 2, taken every few milliseconds."""
    monkeypatch.setattr(committing, "LOCAL_NOTES", 0.01)
    found = ProgressNotes(run, 2)
    yield found
    found.end()


def until(condition: Callable[[], object]) -> None:
    """Waits for something that another thread does."""
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def noted(run: Run) -> int:
    found = run.read(Progress)
    return found.step if found else 0


@pytest.mark.parametrize(
    ("step", "lost"), [(None, Lost()), (3, Lost()), (4, Lost()), (5, Lost(1, 2.0)), (9, Lost(5, 10.0))]
)
def test_what_was_trained_beyond_the_checkpoint_is_lost(step: int | None, lost: Lost, run: Run) -> None:
    if step:
        run.write(Progress(step=step, chunk=1, seconds_per_step=2.0))
    assert ProgressNotes(run, 2).lost(4) == lost


def test_the_step_is_noted_now_and_then(notes: ProgressNotes, run: Run) -> None:
    notes.start(4)
    time.sleep(0.2)
    assert run.read(Progress) is None, "nothing is trained yet"
    notes.step = 6
    until(lambda: noted(run) == 6)
    found = run.read(Progress)
    assert found is not None
    assert found.chunk == 2
    assert 0.1 <= found.seconds_per_step < 15, "of two steps"
    time.sleep(0.05)
    assert run.read(Progress) == found, "once"
    notes.step = 7
    until(lambda: noted(run) == 7)
    notes.end()
    time.sleep(0.05)
    notes.step = 8
    time.sleep(0.1)
    assert noted(run) == 7


@pytest.mark.parametrize(("before", "after"), [(7, 4), (4, 4), (3, 3)])
def test_lost_steps_are_counted_by_the_first_process_alone(
    before: int, after: int, notes: ProgressNotes, run: Run
) -> None:
    run.write(Progress(step=before, chunk=1, seconds_per_step=2.0))
    notes.start(4)
    until(lambda: noted(run) == after)
    time.sleep(0.05)
    assert run.read(Progress) == Progress(step=after, chunk=1, seconds_per_step=2.0)


def test_a_store_that_takes_no_notes_is_asked_again(
    notes: ProgressNotes, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.storage.away = True  # type: ignore[attr-defined]
    notes.start(4)
    until(lambda: "progress was not noted: the store does not answer." in caplog.text)
    caplog.clear()
    notes.step = 5
    until(lambda: "progress was not noted: the store does not answer." in caplog.text)
    run.storage.away = False  # type: ignore[attr-defined]
    notes.step = 6
    until(lambda: noted(run) == 6)


def test_a_chunks_cost_is_added_to_the_runs() -> None:
    progress: Any = SimpleNamespace()
    clock = Clock()
    clock.began = time.time() - 50
    before = RunCost(started=time.time() - 100, trained_seconds=30.0, lost_steps=3, lost_seconds=6.0)
    accounting = Accounting(clock, progress, before, Lost(2, 4.0), restarts=1)
    work = accounting.work(20.0)
    assert work.goodput == pytest.approx(0.5, rel=0.05)
    assert work.model_copy(update={"goodput": 0.0}) == RunCost(
        started=before.started, trained_seconds=50.0, lost_steps=5, lost_seconds=10.0, restarts=1
    )
    first = Accounting(clock, progress, RunCost(), Lost()).work(20.0)
    assert (first.started, first.lost_steps, first.lost_seconds) == (clock.began, 0, 0.0)
    assert first.goodput == pytest.approx(0.4, rel=0.05)
    assert accounting.figures().keys() == {"lost_steps", "lost_seconds", "save_stalls", "peak_bytes"}
    assert (accounting.figures()["lost_steps"], accounting.figures()["lost_seconds"]) == (2, 4.0)


def test_the_most_memory_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = psutil.Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0.98 * held <= committing.peak_bytes() <= 1.02 * most  # the kernel's counts lag behind
    status = "VmPeak:\t 9999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
    monkeypatch.setattr(committing, "open", lambda *_, **__: io.StringIO(status), raising=False)
    assert committing.peak_bytes() == 2 * 1024 * 1024


@pytest.mark.parametrize("status", [None, "VmRSS:\t 1024 kB\n"], ids=["no such file", "no such line"])
def test_elsewhere_it_is_the_memory_of_now(status: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **__: Any) -> io.StringIO:
        if status is None:
            raise FileNotFoundError
        return io.StringIO(status)

    monkeypatch.setattr(committing, "open", opened, raising=False)
    assert committing.peak_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)


class Two(Ranks):
    """The first of two ranks, of which the other has told something."""

    theirs: Any = None
    notice: Any = None

    def gather(self, value: Any) -> list[Any]:
        """Returns what both have told."""
        return [value, self.notice]

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Returns what both have told."""
        return [numbers, self.theirs]


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Returns what makes a rank's part, of a rank that commits nothing."""
    run = Run(Storage(str(tmp_path / "agreed")), "one")
    document = {"name": "one", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}}
    run.create(load.validate(document, origin="one"))
    with PreemptionWatch(Preemption()) as watch, Staging() as staging:

        def made(theirs: Any, committer: Any = None, notice: Any = None) -> Checkpointer:
            kind = type("Told", (Two,), {"theirs": theirs, "notice": notice})
            context = dataclasses.replace(first_chunk(run), ranks=kind(size=2))
            return Checkpointer(context, staging, watch, Watchdog(), committer)

        yield made


NOTHING = StepDecision(stop=False, due_by_time=False, uploader_idle=False)
AGREED: dict[str, tuple[StepDecision, list[float], StepDecision]] = {
    "nothing": (NOTHING, [0, 0, 0, 0], NOTHING),
    "the first stops": (StepDecision(stop=True), [0, 0, 0, 0], StepDecision(stop=True)),
    "the other stops": (NOTHING, [1, 0, 0, 0], StepDecision(stop=True)),
    "the first is late": (StepDecision(due_by_time=True), [0, 0, 0, 0], StepDecision(due_by_time=True)),
    "the other is late": (NOTHING, [0, 1, 0, 0], NOTHING),
    "the first's uploader is idle": (StepDecision(uploader_idle=True), [0, 0, 0, 0], StepDecision(uploader_idle=True)),
    "the other has none": (NOTHING, [0, 0, 1, 0], NOTHING),
    "the first's budget ends": (StepDecision(ends=True), [0, 0, 0, 0], StepDecision(ends=True)),
    "the other's budget ends": (NOTHING, [0, 0, 0, 1], NOTHING),
}
"""What the first has decided, what the other tells → what both do."""


@pytest.mark.parametrize("case", AGREED)
def test_any_rank_ends_the_chunk_and_the_first_decides_the_rest(case: str, one: Callable[..., Checkpointer]) -> None:
    ours, theirs, expected = AGREED[case]
    committer = SimpleNamespace(judge=lambda step, due: ours)
    checkpointer = one(theirs, committer)
    decision = checkpointer.agree(3, due_by_time=False)
    assert decision == expected
    assert decision.figures == ()


def test_a_rank_without_a_committer_decides_nothing(one: Callable[..., Checkpointer]) -> None:
    assert one([0, 0, 0, 0]).agree(3, due_by_time=True) == NOTHING
    decision = one([0, 0, 0, 0, 5.0, 6.0]).agree(3, due_by_time=True, figures=(1.5, 2.5))
    assert decision.figures == [[1.5, 2.5], [5.0, 6.0]]


def test_a_notice_of_another_machine_is_known_here_and_kept(one: Callable[..., Checkpointer]) -> None:
    checkpointer = one(None, notice="SIGTERM")
    assert checkpointer.notice is None
    assert checkpointer.is_preempted()
    assert checkpointer.notice == "SIGTERM"
    checkpointer._ranks = Two(size=2)
    assert not checkpointer.is_preempted()
    assert checkpointer.notice == "SIGTERM"


def test_ranks_that_end_the_chunk_know_why(one: Callable[..., Checkpointer]) -> None:
    checkpointer = one([1, 0, 0, 0], notice="SIGTERM")
    assert checkpointer.agree(3, due_by_time=False).stop
    assert checkpointer.notice == "SIGTERM"
    checkpointer = one([0, 0, 0, 0], notice="SIGTERM")
    assert not checkpointer.agree(3, due_by_time=False).stop
    assert checkpointer.notice is None, "else each step would gather twice"


def test_one_that_arrives_late_is_no_newer_ones_parent(one: Callable[..., Checkpointer], tmp_path: Path) -> None:
    context = one(None).context
    committer = Committer(dataclasses.replace(context, ranks=Ranks()), None, level="bitwise", skipped=[])
    for step in (4, 6):
        folder = tmp_path / f"staged-{step}"
        folder.mkdir()
        (folder / "weights").write_bytes(b"w" * step)
        writer = context.store.open_writer(step)
        writer.send(str(folder))
        context.store.commit(step, writer, CheckpointMeta(digest=f"of {step}"))
    for step, reached in ((4, 4), (6, 6), (4, 6)):
        checkpoint = context.store.read(step)
        pending = PendingCheckpoint(step, str(tmp_path / f"staged-{step}"), digests={"state": f"of {step}"})
        committer._on_commit(pending, checkpoint, True, {})
        assert committer.reached == reached


def test_several_processes_need_room_for_all(
    one: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    checkpointer = one(None, notice=(None, None, None))
    with pytest.raises(BatonError, match="no room to stage a checkpoint, neither in memory nor on disk"):
        next(checkpointer.stage(3, 10))
    checkpointer._ranks = Ranks()
    pending = next(checkpointer.stage(3, 10))
    assert pending.writer, "one process sends it file by file"
    assert (pending.step, Path(pending.folder).name) == (3, "checkpoint-3")
