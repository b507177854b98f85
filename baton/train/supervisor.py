"""Supervisor of a chunk's process: starts it, and a fresh one when it dies of a fault that passes.

The stage's process has imported next to nothing, has no threads and holds no device; it only watches. Whatever kills
its fork, the pod with its GPU stays, and training resumes from the newest checkpoint. A spare fork has its imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Self, TypeVar

import psutil

from baton import errors, events, machine, runtime
from baton.errors import BatonError, DeviceError, ProcessLostError, StoreError, UnavailableError
from baton.runs.documents import Restart
from baton.runs.run import Run, now
from baton.train import imports
from baton.train.chunk import Outcome, run_chunk
from baton.train.distributed import launch

logger = logging.getLogger("baton")

ROOM = 2**30
"""Bytes of memory that a spare process needs at most; half of them are libraries, which all processes share."""
T = TypeVar("T")
Train = Callable[[str, int], Outcome | None]
_PDEATHSIG = 1
"""Option of Linux' prctl."""


@dataclass(frozen=True)
class Ready:
    """What a process that waits tells when it has imported."""


@dataclass(frozen=True)
class Begun:
    """What a process tells when it has trained a step."""


class Worker:
    """A process that trains a chunk.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk.
        train: What it does.
        waits: Whether it imports, and trains once it is told to `go`.
    """

    def __init__(self, run_uri: str, index: int, train: Train, *, waits: bool = False) -> None:
        # A fork of this process is as good as a fresh interpreter.
        context = multiprocessing.get_context("fork") if is_forked() else multiprocessing.get_context("spawn")
        self._reader, writer = context.Pipe(duplex=False)
        gate: Connection | None = None
        self._gate: Connection | None = None
        if waits:
            gate, self._gate = context.Pipe(duplex=False)
        sys.stdout.flush()  # a fork would print it a second time
        self.process = context.Process(
            target=_serve, args=(writer, gate, os.getpid(), run_uri, index, train), name="baton-chunk"
        )
        self.process.start()
        writer.close()

    def go(self) -> bool:
        """Lets it train, and tells whether it does: not where it is gone, or still imports."""
        with contextlib.suppress(EOFError, OSError):
            if self._gate and self._reader.poll() and isinstance(self._reader.recv(), Ready):
                self._gate.send(None)
                return True
        self.end()
        return False

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.join()

    def ended(self, begun: Callable[[], None]) -> Outcome | BatonError | None:
        """Waits for its end.

        Args:
            begun: Called once it has trained a step.

        Returns:
            What it has said; None where it has ended without a word.
        """
        while True:
            # Neither the pipe's end nor the process's sentinel tells: what it has started may hold both open.
            while self.process.is_alive() and not self._reader.poll(0.2):
                pass
            try:
                told: Outcome | BatonError | Begun | None = self._reader.recv() if self._reader.poll() else None
            except (EOFError, OSError):
                told = None
            if not isinstance(told, Begun):
                self.process.join()
                return told
            begun()


class Spare:
    """A process that waits for the one that trains to be lost, so that the next one need not import: a context manager.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk.
        train: What it does then.
    """

    def __init__(self, run_uri: str, index: int, train: Train) -> None:
        self._arguments = (run_uri, index, train)
        self._waiting: Worker | None = None

    @property
    def pid(self) -> int | None:
        """Number of the process that waits."""
        return self._waiting.process.pid if self._waiting else None

    def prepare(self, beside: int) -> None:
        """Starts one, unless there is no room for it.

        Args:
            beside: Number of the process that trains.
        """
        # A stage that was itself forked with all of it imported has nothing to prepare.
        if not is_forked() or os.environ.get(machine.FORKSERVER) == "0" or "torch" in sys.modules:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            # As much again as training holds: its next checkpoint is staged in memory.
            if machine.available_memory() > psutil.Process(beside).memory_info().rss + ROOM:
                self._waiting = Worker(*self._arguments, waits=True)

    def take(self) -> Worker:
        """Returns a process that trains: the one that waits, else a fresh one."""
        worker, self._waiting = self._waiting, None
        # At its priority what is left of its imports may take longer than a fresh process takes for all of them.
        if worker is None or not worker.go():
            return Worker(*self._arguments)
        logger.info("a process that has imported already takes its place")
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._waiting.end()


def is_forked() -> bool:
    """Tells whether processes are forked here: elsewhere what libraries load does not outlive a fork."""
    return sys.platform == "linux"


def run_in_subprocess(function: Callable[..., T], *arguments: object) -> T | None:
    """Calls a function that asks the store in a process of its own, and returns what it returns; None where that died.

    The store's client has threads. A process that is forked from one that has asked it lacks them, and would wait for
    them for ever.
    """
    if not is_forked():
        return function(*arguments)
    with (
        contextlib.suppress(BrokenProcessPool),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool,
    ):
        return pool.submit(function, *arguments).result()
    return None


def as_shared(error: Exception) -> BatonError:
    """Returns an error as one of `baton.errors`, which every process can read."""
    if isinstance(error, BatonError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return kind(error.message, remedy=error.remedy)
    text = errors.in_words(error)
    return ProcessLostError(text) if launch.is_device_broken(text) else BatonError(text)


def _serve(writer: Connection, gate: Connection | None, parent: int, run_uri: str, index: int, train: Train) -> None:
    """Trains, in the process of its own, and tells what came of it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the handler of the process it is forked from
    _die_with(parent)
    if gate and not _waited(gate, writer, run_uri):
        return
    is_first = True

    def hear(event: events.Event) -> None:
        nonlocal is_first
        if is_first and isinstance(event, events.Step):
            is_first = False
            writer.send(Begun())

    events.hear(hear)
    try:
        writer.send(train(run_uri, index))
    except Exception as error:
        if not isinstance(error, BatonError):
            logger.exception("chunk %d failed", index)
        writer.send(as_shared(error))
    sys.stdout.flush()
    sys.stderr.flush()


def _waited(gate: Connection, writer: Connection, run_uri: str) -> bool:
    """Imports what training imports, beside the process that trains, and waits until that is lost."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the stage ends it
    import numpy  # noqa: F401 - its threads are this thread's, those below are slow for ever

    # Priority is a thread's own, and cannot be raised again: the main thread keeps that of a process that trains.
    importing = threading.Thread(target=_import, args=(run_uri,), name="baton-import")
    importing.start()
    importing.join()
    writer.send(Ready())
    try:
        gate.recv()
    except EOFError:
        return False
    signal.signal(signal.SIGINT, before)
    return True


def _import(run_uri: str) -> None:
    os.nice(19)
    with contextlib.suppress(Exception):  # it will be said when training imports it
        imports.import_training_stack(Run.open(run_uri).recipe())
        from baton.train import attempt  # noqa: F401


def _die_with(parent: int) -> None:
    """Lets the kernel kill this process when the stage's own is killed: two would train the same chunk."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that
        os.kill(os.getpid(), signal.SIGKILL)


PAUSE_S = 2.0
"""Seconds before the second process; before the third eight times as many."""
LONGEST_PAUSE_S = 300.0
DIVERGED = (
    "See whether training has diverged: a loss or weights that are no longer finite, a token beyond the vocabulary. "
    "Then lower training.learning_rate or mend the rows around this step; a broken device needs another node."
)
_CHILD_SUBREAPER = 36
"""Option of Linux' prctl."""


def run(run_uri: str, index: int, train: Train = run_chunk) -> Outcome:
    """Runs a chunk in a process of its own, and in another one where that is lost, `chunks.retries` times at most.

    A process that has found a step to skip is not lost: the next one follows at once, and does not count.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk.
        train: What the process does.

    Returns:
        What the chunk has come to.

    Raises:
        BatonError: what a process has ended of that another one would end of, too, or the last one of several.
    """
    with Spare(run_uri, index, train) as spare:
        return _run(run_uri, index, spare)


def _run(run_uri: str, index: int, spare: Spare) -> Outcome:
    tries = runtime.backoff(math.inf, pause=PAUSE_S, growth=8, longest=LONGEST_PAUSE_S)
    broken, restarts = "", list[Restart]()
    while True:
        number, began = next(tries).number, time.monotonic()
        if restarts:
            del restarts[: run_in_subprocess(_note, run_uri, restarts) or 0]
        try:
            outcome = runtime.through_skips(lambda: _attempt(index, spare))
            if not outcome.interrupted or number > (retries := _limit(run_uri)):
                return outcome
            reason = outcome.interrupted
        except (ProcessLostError, UnavailableError) as error:
            if number > (retries := _limit(run_uri)):
                raise
            if isinstance(error, DeviceError) and error.message == broken:
                raise BatonError(f"{error.message} So did the process before.", remedy=DIVERGED) from None
            broken = reason = error.message
        seconds = round(time.monotonic() - began, 1)
        restarts.append(Restart(chunk=index, reason=reason, at=now(), seconds=seconds))
        events.emit(events.Restarted(chunk=index, attempt=number, of=retries, reason=reason))
        logger.warning("%s It starts again in this pod, %d of %d times", reason, number, retries)


def _note(run_uri: str, restarts: list[Restart]) -> int:
    """Keeps with the run which processes were lost, and returns how many of them the store has taken."""
    number = 0
    with contextlib.suppress(StoreError):
        for restart in restarts:
            Run.open(run_uri).note_restart(restart)
            number += 1
    return number


def _limit(run_uri: str) -> int:
    retries = run_in_subprocess(_retries, run_uri)
    return 1 if retries is None else retries  # a store that is out of reach does not tell


def _retries(run_uri: str) -> int | None:
    with contextlib.suppress(StoreError):
        return Run.open(run_uri).recipe().chunks.retries
    return None


def _attempt(index: int, spare: Spare) -> Outcome:
    """Returns what a process has come to.

    Raises:
        ProcessLostError: it was lost to what a fresh one may be spared.
        BatonError: whatever else it has ended of.
    """
    _adopt_orphans()
    killed_before, others = machine.oom_kills(), set(psutil.Process().children(recursive=True))
    worker = spare.take()
    with _ends_with(worker.process) as is_preempted:
        ended = worker.ended(lambda: spare.prepare(worker.process.pid or 0))
    for orphan in set(psutil.Process().children(recursive=True)) - others:
        if orphan.pid != spare.pid:
            orphan.kill()
    if isinstance(ended, Outcome):
        return replace(ended, interrupted="") if is_preempted.is_set() else ended
    error = ended or _unsaid(index, worker.process.exitcode or 0)
    if (
        isinstance(error, ProcessLostError) and machine.oom_kills() > killed_before
    ):  # also of a rank that its launcher names
        raise machine.without_memory(error)
    if is_preempted.is_set():  # the pod goes; what is left of its time is not enough for another process
        raise BatonError(error.message, remedy=error.remedy)
    raise error


def _unsaid(index: int, code: int) -> BatonError:
    """Returns the error of a process that has said nothing."""
    if code < 0:
        name = signal.Signals(-code).name
        remedy = "Run again: training resumes from the newest checkpoint."
        return ProcessLostError(f"the process of chunk {index} was ended by {name}.", remedy=remedy)
    return BatonError(f"the process of chunk {index} ended with code {code} and said nothing.", remedy="See the log.")


def _adopt_orphans() -> None:
    """Lets the kernel give this process what a killed one leaves: ranks and workers, which would hold its device."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def _ends_with(process: BaseProcess) -> Iterator[threading.Event]:
    """Passes SIGTERM on to a process, which then saves; whatever else ends the block ends the process.

    Yields:
        What is set once SIGTERM has come.
    """
    is_preempted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield is_preempted
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        is_preempted.set()
        if process.pid and process.is_alive():
            os.kill(process.pid, number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield is_preempted
    except BaseException:
        process.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_preempted.is_set() and process.exitcode == -signal.SIGTERM:  # it came before there was anything to save
        os.kill(os.getpid(), signal.SIGTERM)
