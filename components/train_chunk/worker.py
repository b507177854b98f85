"""The process that trains a chunk, and a spare one that has imported what training imports and waits for its loss.

All are forks of a process that watches, which has imported next to nothing, holds no device and has no threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Self, TypeVar

import psutil

from baton.components.shared.core import errors, events, machine
from baton.components.shared.core.errors import BatonError, LostError
from baton.components.shared.runs.run import Run
from baton.components.train_chunk import lean
from baton.components.train_chunk.distributed import devices
from baton.components.train_chunk.outcome import Outcome

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
        if not is_forked() or os.environ.get(machine.WARM) == "0" or "torch" in sys.modules:
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


def apart(function: Callable[..., T], *arguments: object) -> T | None:
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
    """Returns an error as one of `baton.components.shared.core.errors`, which every process can read."""
    if isinstance(error, BatonError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return kind(error.message, remedy=error.remedy)
    text = errors.in_words(error)
    return LostError(text) if devices.is_broken(text) else BatonError(text)


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
        lean.load(Run.open(run_uri).recipe())
        from baton.components.train_chunk import training  # noqa: F401


def _die_with(parent: int) -> None:
    """Lets the kernel kill this process when the stage's own is killed: two would train the same chunk."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that
        os.kill(os.getpid(), signal.SIGKILL)
