"""A chunk's processes on this machine: torch's launcher starts them, and their ends become one message."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import psutil

from components.shared import errors, events
from components.shared.clock import Clock
from components.shared.errors import BatonError
from components.train_chunk.trainjob import meeting

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from components.train_chunk.chunk import Chunk

logger = logging.getLogger("baton")

KINDS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
"""Our own errors by name, as torch's launcher writes them down."""
PEERS = 3.0
"""Seconds for which an error waits that may only be another process's end, so that this one is seen first."""

_taken_away = threading.Event()


def bring(chunk: Chunk) -> dict[str, Any]:
    """Has several processes bring the run to the chunk's target.

    A signal that this machine will be taken away is passed on to them; what they save then is their own affair.

    Args:
        chunk: The chunk, whose target is not committed yet.

    Returns:
        What `Chunk.bring` returns.

    Raises:
        BatonError: one of them failed; the message names it.
    """
    chunk.clock.enter("launch", processes=chunk.recipe.processes)
    agent = _Agent(chunk)
    agent.start()
    before = _catch_sigterm()
    try:
        told: set[int] = set()
        while agent.is_alive():
            agent.join(0.2)
            if _taken_away.is_set():
                _pass_on(told)
    except BaseException:
        for child in psutil.Process().children(recursive=True):
            child.kill()
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return agent.result()


def work(run_uri: str, index: int, leave_out: tuple[str, ...], clock: Clock) -> dict[str, Any]:
    """What each of the processes does.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk.
        leave_out: As in `Chunk`.
        clock: Goes on from the launching process's.
    """
    from components.train_chunk.chunk import Chunk

    if signal.getsignal(signal.SIGTERM) is _note_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked one has it from the launching process
    events.setup_logging()
    chunk = Chunk(run_uri, index, leave_out)
    chunk.clock = clock
    try:
        return chunk.bring()
    except BatonError:
        raise
    except Exception:
        time.sleep(PEERS)
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class _Agent(threading.Thread):
    """Torch's launcher, in a thread: in the main one it would take the signals for itself, and save nothing."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__(name="baton-launcher")
        self._chunk = chunk
        self._folder = tempfile.TemporaryDirectory(prefix="baton-launch-")
        self._found: dict[int, Any] = {}
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Runs the processes to their end."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        chunk = self._chunk
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says, `result` says shorter
        logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
        config = LaunchConfig(
            **meeting.settings(f"{chunk.run.name}-{chunk.index}"),
            nproc_per_node=chunk.recipe.processes,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=self._folder.name),
            # What has imported everything and has done nothing yet is as good as a fresh interpreter, and quicker.
            start_method="fork" if "trl" in sys.modules else "spawn",
        )
        try:
            self._found = elastic_launch(config, work)(chunk.run.uri, chunk.index, chunk.leave_out, chunk.clock)
        except BaseException as error:
            self._failure = error
        finally:
            self._folder.cleanup()

    def result(self) -> dict[str, Any]:
        """Returns what the first process found, once the thread has ended.

        Raises:
            BatonError: a process failed.
        """
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if isinstance(self._failure, ChildFailedError):
            raise _explained(self._failure) from None
        if self._failure:
            raise self._failure
        found: dict[str, Any] = self._found.get(0, {})  # on another machine than the first there is none
        return found


def _catch_sigterm() -> Any:
    """Catches SIGTERM for the processes, and returns what handled it before; None outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    _taken_away.clear()
    return signal.signal(signal.SIGTERM, _note_sigterm) or signal.SIG_DFL


def _note_sigterm(*_: Any) -> None:
    _taken_away.set()


def _pass_on(told: set[int]) -> None:
    """Sends SIGTERM to each process once, also to one that was not there yet when it came."""
    for child in psutil.Process().children():
        if child.pid not in told:
            told.add(child.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGTERM)


def _explained(failed: ChildFailedError) -> BatonError:
    """Returns one error for all processes' ends: one that says why, else the first one's."""
    failures = sorted(failed.failures.values(), key=lambda failure: failure.timestamp)
    for failure in failures:
        kind, _, text = _message(failure).partition(": ")
        if kind in KINDS:
            return KINDS[kind](text)
    first = next((failure for failure in failures if failure.exitcode < 0), failures[0])
    if first.exitcode < 0:
        return BatonError(
            f"rank {first.local_rank} was ended by {first.signal_name()}.",
            remedy="Run again: training goes on from the newest checkpoint.",
        )
    logger.error("rank %d: %s", first.local_rank, _stack(first))
    return BatonError(f"rank {first.local_rank} failed: {_message(first) or f'exit code {first.exitcode}'}.")


def _message(failure: ProcessFailure) -> str:
    data = failure.error_file_data.get("message", "")
    return str(data.get("message", "") if isinstance(data, dict) else data)


def _stack(failure: ProcessFailure) -> str:
    data = failure.error_file_data.get("message", "")
    return str(data.get("extraInfo", {}).get("py_callstack", "") if isinstance(data, dict) else data)


def note_failure(message: str) -> None:
    """Writes down for torch's launcher why this process ends, and ends it."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    handler = ErrorHandler()
    try:
        handler.record_exception(BatonError(message))
    except Exception:
        traceback.print_exc()
    if multiprocessing.parent_process() is None:  # torchrun started this, and nobody of ours reads what was written
        events.emit("error", stage="train chunk", message=message, exit_code=BatonError.exit_code)
        logger.error("%s", message)
    os._exit(BatonError.exit_code)
