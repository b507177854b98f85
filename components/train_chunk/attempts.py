"""A chunk's process, and the next one where it dies of something that a fresh process may be spared, or skips.

The stage's own process only watches: whatever ends the one that trains (a signal, a CUDA context that is broken, a
store that was out of reach), the pod with its GPU stays, and training resumes from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from types import FrameType

import psutil

from baton.components.shared.core import events, machine, patience
from baton.components.shared.core.errors import BatonError, BrokenError, LostError, StoreError, UnavailableError
from baton.components.shared.runs.documents.training import Restart
from baton.components.shared.runs.run import Run, now
from baton.components.train_chunk.outcome import Outcome
from baton.components.train_chunk.stage import run_chunk
from baton.components.train_chunk.worker import Spare, Train, apart

logger = logging.getLogger("baton")

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
    tries = patience.attempts(math.inf, pause=PAUSE_S, growth=8, longest=LONGEST_PAUSE_S)
    broken, restarts = "", list[Restart]()
    while True:
        number, began = next(tries).number, time.monotonic()
        if restarts:
            del restarts[: apart(_note, run_uri, restarts) or 0]
        try:
            outcome = patience.through_skips(lambda: _attempt(index, spare))
            if not outcome.interrupted or number > (retries := _limit(run_uri)):
                return outcome
            reason = outcome.interrupted
        except (LostError, UnavailableError) as error:
            if number > (retries := _limit(run_uri)):
                raise
            if isinstance(error, BrokenError) and error.message == broken:
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
    retries = apart(_retries, run_uri)
    return 1 if retries is None else retries  # a store that is out of reach does not tell


def _retries(run_uri: str) -> int | None:
    with contextlib.suppress(StoreError):
        return Run.open(run_uri).recipe().chunks.retries
    return None


def _attempt(index: int, spare: Spare) -> Outcome:
    """Returns what a process has come to.

    Raises:
        LostError: it was lost to what a fresh one may be spared.
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
    if isinstance(error, LostError) and machine.oom_kills() > killed_before:  # also of a rank that its launcher names
        raise machine.without_memory(error)
    if is_preempted.is_set():  # the pod goes; what is left of its time is not enough for another process
        raise BatonError(error.message, remedy=error.remedy)
    raise error


def _unsaid(index: int, code: int) -> BatonError:
    """Returns the error of a process that has said nothing."""
    if code < 0:
        name = signal.Signals(-code).name
        remedy = "Run again: training resumes from the newest checkpoint."
        return LostError(f"the process of chunk {index} was ended by {name}.", remedy=remedy)
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
