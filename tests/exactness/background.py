"""Chunks that run beside the test: paused, told to leave, or racing each other."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import legs

from baton import events

Awaited = TypeVar("Awaited", bound=events.Event)


class Paused(events.Event, kind="paused"):
    """The process stops itself."""


def slow_chunk(run_uri: str, index: int, seconds: float, patience: float = 20) -> None:
    """Runs a chunk whose steps take so much longer that something can happen in between.

    Args:
        run_uri: The run.
        index: The chunk.
        seconds: Seconds before each step.
        patience: Seconds for which one operation on a store that is away is tried again.
    """
    os.environ["BATON_STORE_PATIENCE"] = str(patience)
    from baton.train.attempt import RestoreCheck
    from baton.train.chunk import run_chunk

    begin = RestoreCheck.on_step_begin

    def slowly(self: Any, *arguments: Any, **options: Any) -> None:
        time.sleep(seconds)
        begin(self, *arguments, **options)

    RestoreCheck.on_step_begin = slowly  # type: ignore[method-assign]
    run_chunk(run_uri, index)


def noticed_chunk(run_uri: str, index: int, step: int, notice_file: str | None) -> None:
    """Runs a chunk that is told to leave as a step begins.

    Args:
        run_uri: The run.
        index: The chunk.
        step: After how many steps.
        notice_file: The file that appears; None for a SIGTERM. Steps are slow then, as it is looked for once a second.
    """
    from baton.train.attempt import RestoreCheck
    from baton.train.chunk import run_chunk

    begin = RestoreCheck.on_step_begin

    def told(self: Any, args: Any, state: Any, *arguments: Any, **options: Any) -> None:
        begin(self, args, state, *arguments, **options)
        if notice_file is None and state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        elif notice_file is not None and state.global_step >= step:
            open(notice_file, "w").close()
            time.sleep(0.5)

    RestoreCheck.on_step_begin = told  # type: ignore[method-assign]
    run_chunk(run_uri, index)


def pausing_chunk(run_uri: str, index: int, phase: str, step: int, leave_out: tuple[str, ...] = ()) -> None:
    """Runs a chunk that stops itself, as SIGSTOP does, when it enters a phase of a step's checkpoint."""
    from baton.train.chunk import run_chunk

    told = events.emit

    def emit(event: events.Event) -> None:
        told(event)
        if isinstance(event, events.Phase) and (event.phase, event.step) == (phase, step):
            told(Paused())
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # another thread would stop this one too late

    events.emit = emit
    run_chunk(run_uri, index, leave_out)


def chunk_staged_in(run_uri: str, index: int, memory: str, disk: str | None, trusting: bool = False) -> None:
    """Runs a chunk with other folders for memory and disk.

    Args:
        run_uri: The run.
        index: The chunk.
        memory: What stands for `/dev/shm`.
        disk: What stands for the temporary folder; that itself when None.
        trusting: Whether the first place is taken to have room, whatever it says.
    """
    import tempfile

    from baton.checkpoint import staging
    from baton.train.chunk import run_chunk

    staging.MEMORY = memory
    if disk:
        tempfile.tempdir = disk
    if trusting:
        staging.shutil.disk_usage = lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40)  # type: ignore[attr-defined]
    run_chunk(run_uri, index)


def judge(run_uri: str) -> None:
    """Runs the evaluate stage."""
    from baton.evaluate.evaluate import evaluate_run

    evaluate_run(run_uri)


class Background:
    """A leg that runs while the test goes on.

    Args:
        function: What it runs; see `legs`.
        arguments: What with.
    """

    def __init__(
        self, function: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None
    ) -> None:
        reader, writer = os.pipe()
        given = {**legs._credentials(), "BATON_EVENTS": "stdout", **(environment or {})}
        self.process = legs._context.Process(
            target=legs._redirected, args=(legs._DupFd(writer), given, function, arguments)
        )
        self.process.start()
        os.close(writer)
        self.lines: list[str] = []
        self.events: list[events.Event] = []
        self._changed = threading.Condition()
        self._reading = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._reading.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid
        return self.process.pid

    @property
    def printed(self) -> str:
        """All it has printed that is no event."""
        return "".join(self.lines)

    def wait_for(self, kind: type[Awaited], timeout: float = 60, **fields: object) -> Awaited:
        """Returns the first event of a kind that has these values, once it is there."""

        def found() -> Awaited | None:
            ours = (event for event in self.events if isinstance(event, kind))
            return next((event for event in ours if fields.items() <= vars(event).items()), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._reading.is_alive(), timeout)
        event = found()
        assert event, f"no {kind} {fields} in {self.events}\n{self.printed}"
        return event

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 90) -> int:
        """Returns its exit code."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running: {self.events[-3:]}\n{self.printed}"
        self._reading.join(5)
        return int(self.process.exitcode)

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as output:
            for line in output:
                event = events.parse(line)
                with self._changed:
                    self.events.append(event) if event else self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
