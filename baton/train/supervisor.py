"""Supervisor of a chunk's process: starts it, and a fresh one when it dies of a fault that passes.

The stage's process has imported next to nothing, has no threads, holds no device and asks no store; it only watches.
Whatever kills the fork that trains (a signal, a broken CUDA context, a store out of reach), the pod keeps its GPU, and
training resumes from the newest checkpoint. A spare fork has its imports.
"""

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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType

import psutil

from baton import errors, events, machine, runtime
from baton.errors import BatonError, DeviceError, ProcessLostError, UnavailableError
from baton.runs.documents import Restart
from baton.runs.run import Run, now
from baton.train import distributed, imports
from baton.train.chunk import Outcome, run_chunk

logger = logging.getLogger("baton")

ROOM = 2**30  # most bytes of memory that a spare process needs; half are libraries, which all processes share
PAUSE_S = 2.0  # seconds before the second process; before the third eight times as many
LONGEST_PAUSE_S = 300.0
DIVERGED = (
    "See whether training has diverged: a loss or weights that are no longer finite, a token beyond the vocabulary. "
    "Then lower training.learning_rate or fix the rows around this step; a broken device needs another node."
)
_CHILD_SUBREAPER = 36  # of prctl(2)

Train = Callable[[str, int], Outcome | None]


@dataclass(frozen=True)
class Message:
    """From a process before its end: `ready` to train, `noted` per lost process, `retries`, and the first `step`."""

    kind: str
    value: int = 0


class ChunkProcess:
    """A process that trains a chunk; with None for the lost ones before it, it imports and waits for `go`."""

    def __init__(self, run_uri: str, index: int, train: Train, lost: list[Restart] | None) -> None:
        # A fork of this process is as good as a fresh interpreter.
        context = multiprocessing.get_context("fork") if is_forked() else multiprocessing.get_context("spawn")
        self._reader, writer = context.Pipe(duplex=False)
        gate, self._gate = context.Pipe(duplex=False)
        sys.stdout.flush()  # a fork would print it a second time
        self.process = context.Process(
            target=_serve, args=(writer, gate, lost is None, os.getpid(), run_uri, index, train), name="baton-chunk"
        )
        self.process.start()
        writer.close()
        if lost is not None:
            self._gate.send(lost)

    def go(self, lost: list[Restart]) -> bool:
        """Lets it train; False where it is gone, or still imports."""
        with contextlib.suppress(EOFError, OSError):
            if self._reader.poll() and self._reader.recv() == Message("ready"):
                self._gate.send(lost)
                return True
        self.kill()
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def outcome(self, hear: Callable[[Message], None]) -> Outcome | BatonError | None:
        """Waits for its end, forwards its messages, and returns its last one, None for none."""
        while True:
            # Neither the pipe's end nor the process's sentinel tells: what it has started may hold both open.
            while self.process.is_alive() and not self._reader.poll(0.2):
                pass
            try:
                received: Outcome | BatonError | Message | None = self._reader.recv() if self._reader.poll() else None
            except (EOFError, OSError):
                received = None
            if not isinstance(received, Message):
                self.process.join()
                return received
            hear(received)


def is_forked() -> bool:
    """Tells whether processes are forked here: elsewhere, libraries' state does not outlive a fork."""
    return sys.platform == "linux"


def as_shared(error: Exception) -> BatonError:
    """Returns an error as one of `baton.errors`, which every process can read."""
    if isinstance(error, BatonError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return kind(error.message, remedy=error.remedy)
    text = errors.in_words(error)
    return ProcessLostError(text) if distributed.is_device_broken(text) else BatonError(text)


def _serve(
    writer: Connection, gate: Connection, waits: bool, parent: int, run_uri: str, index: int, train: Train
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the handler of the process it is forked from
    machine.end_with_parent(parent)
    if waits:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the stage ends it
        import numpy  # noqa: F401 - its threads are this thread's, those below are slow for ever

        # Priority is a thread's own, and cannot be raised again: the main thread keeps that of a process that trains.
        importing = threading.Thread(target=_import, args=(run_uri,), name="baton-import")
        importing.start()
        importing.join()
        writer.send(Message("ready"))
    try:
        lost: list[Restart] = gate.recv()
    except EOFError:
        return
    if waits:
        signal.signal(signal.SIGINT, before)
    is_first = True

    def hear(event: events.Event) -> None:
        nonlocal is_first
        if is_first and isinstance(event, events.Step):
            is_first = False
            writer.send(Message("step"))

    events.hear(hear)
    try:
        run = Run.open(run_uri)
        for restart in lost:  # before training counts them
            run.note_restart(restart)
            writer.send(Message("noted"))
        writer.send(Message("retries", run.recipe().chunks.retries))
        writer.send(train(run_uri, index))
    except Exception as error:
        if not isinstance(error, BatonError):
            logger.exception("chunk %d failed", index)
        writer.send(as_shared(error))
    sys.stdout.flush()
    sys.stderr.flush()


def _import(run_uri: str) -> None:
    os.nice(19)
    with contextlib.suppress(Exception):  # training imports the same, and raises
        imports.import_training_stack(Run.open(run_uri).recipe())
        from baton.train import attempt  # noqa: F401


def run(run_uri: str, index: int, train: Train = run_chunk) -> Outcome:
    """Runs a chunk in a process of its own, and in another one where that is lost, `chunks.retries` times at most.

    Raises:
        BatonError: a process ended of a fault that another would meet too, or the last one of several was lost.
    """
    supervisor = _Supervisor(run_uri, index, train)
    try:
        return supervisor.run()
    finally:
        if supervisor.spare:
            supervisor.spare.kill()


class _Supervisor:
    """State that outlives the processes of a chunk."""

    def __init__(self, run_uri: str, index: int, train: Train) -> None:
        self._chunk, self._index = (run_uri, index, train), index
        self._lost: list[Restart] = []  # lost processes that the run has not noted
        self._retries = 1  # until a process has asked the store
        # In reserve for a lost training process, so that the next one need not import.
        self.spare: ChunkProcess | None = None

    def run(self) -> Outcome:
        tries = runtime.backoff(math.inf, pause=PAUSE_S, growth=8, longest=LONGEST_PAUSE_S)
        broken = ""
        while True:
            number, began = next(tries).number, time.monotonic()
            try:
                outcome = runtime.through_skips(self._attempt)  # a process that found a step to skip is not lost
                if not outcome.interrupted or number > self._retries:
                    return outcome
                reason = outcome.interrupted
            except (ProcessLostError, UnavailableError) as error:
                if number > self._retries:
                    raise
                if isinstance(error, DeviceError) and error.message == broken:
                    raise BatonError(f"{error.message} So did the process before.", remedy=DIVERGED) from None
                broken = reason = error.message
            seconds = round(time.monotonic() - began, 1)
            self._lost.append(Restart(chunk=self._index, reason=reason, at=now(), seconds=seconds))
            events.emit(events.Restarted(chunk=self._index, attempt=number, of=self._retries, reason=reason))
            logger.warning("%s It starts again in this pod, %d of %d times", reason, number, self._retries)

    def _attempt(self) -> Outcome:
        """Returns the outcome of one process; raises `ProcessLostError` where a fresh one may be spared its fault."""
        if sys.platform == "linux":
            # The kernel gives this process the orphans of a killed one: ranks and workers, which would hold its device.
            ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)
        killed_before, others = machine.oom_kills(), set(psutil.Process().children(recursive=True))
        worker, self.spare = self.spare, None
        # A spare one that still imports is no help: at its priority that may take longer than a fresh process takes.
        if worker and worker.go(self._lost):
            logger.info("a process that has imported already takes its place")
        else:
            worker = ChunkProcess(*self._chunk, self._lost)
        beside = worker.process

        def hear(message: Message) -> None:
            match message.kind:
                case "noted":
                    del self._lost[0]
                case "retries":
                    self._retries = message.value
                case "step":
                    self._prepare_spare(beside)

        with _ends_with(beside) as is_preempted:
            ended = worker.outcome(hear)
        for orphan in set(psutil.Process().children(recursive=True)) - others:
            if not (self.spare and orphan.pid == self.spare.process.pid):
                orphan.kill()
        if isinstance(ended, Outcome):
            return replace(ended, interrupted="") if is_preempted.is_set() else ended
        error = ended or _unsaid(self._index, beside.exitcode or 0)
        # Also where the launcher names the rank that was lost.
        if isinstance(error, ProcessLostError) and machine.oom_kills() > killed_before:
            raise machine.without_memory(error)
        if is_preempted.is_set():  # the pod goes; its remaining time is too short for another process
            raise BatonError(error.message, remedy=error.remedy)
        raise error

    def _prepare_spare(self, beside: BaseProcess) -> None:
        """Starts a process in reserve for the training one, if memory allows."""
        # A stage that was itself forked with all of it imported has nothing to prepare.
        if not is_forked() or not machine.forks_stages() or "torch" in sys.modules:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            # As much again as training holds: its next checkpoint is staged in memory.
            if machine.available_memory() > psutil.Process(beside.pid).memory_info().rss + ROOM:
                self.spare = ChunkProcess(*self._chunk, lost=None)


def _unsaid(index: int, code: int) -> BatonError:
    if code < 0:
        name = signal.Signals(-code).name
        remedy = "Run again: training resumes from the newest checkpoint."
        return ProcessLostError(f"the process of chunk {index} was ended by {name}.", remedy=remedy)
    return BatonError(f"the process of chunk {index} ended with code {code} and no message.", remedy="See the log.")


@contextlib.contextmanager
def _ends_with(process: BaseProcess) -> Iterator[threading.Event]:
    """Passes SIGTERM on to a process, which then saves, and yields its event; an error in the block kills it."""
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
