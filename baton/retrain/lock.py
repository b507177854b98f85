"""Lock of a model in the store, held for a turn by one retraining at a time.

    models/<name>/turns/000007/turn.json     its holder: put-if-absent, so one of several takers gets it
    models/<name>/turns/000007/runs.json     the runs that it trains
    models/<name>/turns/000007/ended.json    its end

A turn also ends when its process is known to be dead, or when neither it nor its runs were written to for `expires_s`;
a chunk that trains notes its step every ten seconds. All times, the present too, are those that the store gives to
objects, so that clocks need not agree.

A holder that was only asleep may wake after its turn. It does no harm: checkpoints are bundles, and `accepted` takes
one of two models with the same rival.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from baton.documents import Document, load
from baton.runs.run import now
from baton.runtime import backoff
from baton.store.storage import Storage

PROCESS = "BATON_RETRAIN_PROCESS"
"""Environment variable: the process with which the turn ends, as `this_process` writes it."""
_CLOCK = "clock-"
_LONGEST_PAUSE = 30.0


class LockHolder(Document):
    owner: str
    at: str
    process: str | None = None
    """As in `PROCESS`."""


class RetrainLock:
    """`owner` is a retraining's name, which its restarted stages have too."""

    def __init__(self, storage: Storage, name: str, owner: str) -> None:
        self._storage, self._owner = storage, owner
        self._folder = f"models/{name}/turns"

    def acquire(
        self, *, wait: bool, expires_s: float, on_wait: Callable[[LockHolder], None] = lambda holder: None
    ) -> bool:
        """Acquires the lock, and tells whether it is ours now; `on_wait` is called once for each other holder."""
        told = 0
        for _ in backoff(math.inf, pause=0.5, growth=2, longest=_LONGEST_PAUSE):
            number, holder = self._claimed(expires_s)
            if holder.owner == self._owner:
                return True
            if not wait:
                break
            if told != number:
                on_wait(holder)
                told = number
        return False

    def note_runs(self, runs: list[str]) -> None:
        if number := self._ours():
            self._storage.write(f"{self._path(number)}/runs.json", json.dumps(runs).encode())

    def release(self) -> None:
        if number := self._ours():
            self._storage.create(f"{self._path(number)}/ended.json", json.dumps({"at": now()}).encode())

    def _ours(self) -> int | None:
        number = self._newest()
        holder = self._holder(number)
        return number if holder and holder.owner == self._owner and not self._is_over(number) else None

    def _newest(self) -> int:
        return max((int(name) for name in self._storage.list(self._folder) if name.isdecimal()), default=0)

    def _claimed(self, expires_s: float) -> tuple[int, LockHolder]:
        """Returns the current turn and its holder, after beginning one where there was none."""
        while True:
            number = self._newest()
            holder = self._holder(number)
            if holder is None:  # the first, or one that is being written
                self._begin(max(number, 1))
                continue  # whose it is, is read back
            is_over = self._is_over(number)
            # A restarted stage of this retraining still has its turn.
            if holder.owner == self._owner and not is_over:
                return number, holder
            if not is_over and not self._is_gone(number, holder, expires_s):
                return number, holder
            # Others may see the same end and create it too: the loop reads back whose it is.
            self._begin(number + 1)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:06d}"

    def _begin(self, number: int) -> None:
        holder = LockHolder(owner=self._owner, at=now(), process=os.environ.get(PROCESS))
        self._storage.create(f"{self._path(number)}/turn.json", json.dumps(holder.to_json()).encode())

    def _holder(self, number: int) -> LockHolder | None:
        path = f"{self._path(number)}/turn.json"
        with contextlib.suppress(FileNotFoundError):
            return LockHolder.read(self._storage.read(path), self._storage.uri(path))
        return None

    def _is_over(self, number: int) -> bool:
        return self._storage.exists(f"{self._path(number)}/ended.json")

    def _is_gone(self, number: int, holder: LockHolder, expires_s: float) -> bool:
        if _has_died(holder.process):
            return True
        clock = f"{self._path(number)}/{_CLOCK}{uuid.uuid4().hex}"
        self._storage.write(clock, b"")
        try:
            written = self._storage.find(self._path(number))
            present = written[clock.rpartition("/")[2]][1]
            signs = [at for name, (_, at) in written.items() if not name.startswith(_CLOCK)]
            runs: list[str] = []
            # Runs that are not noted yet, or damaged, are no sign of life.
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                runs = [str(run) for run in load(self._storage.read(f"{self._path(number)}/runs.json"))]
            for run in runs:
                signs += [at for _, at in self._storage.find(f"runs/{run}").values()]
        except FileNotFoundError:  # a file was renamed during the listing, so somebody lives
            return False
        finally:
            self._storage.remove(clock)
        # `signs` has the turn itself at least, which `_claimed` has read.
        return (present - max(signs)).total_seconds() > expires_s


def this_process() -> str:
    """Returns an identity of this process that no later process of the same number has."""
    return json.dumps({"machine": _machine(), "pid": os.getpid(), "began": psutil.Process().create_time()})


def _has_died(process: str | None) -> bool:
    try:
        known = json.loads(process) if process else None
        if known is None or known["machine"] != _machine():
            return False
        process_now = psutil.Process(known["pid"])
        is_another = abs(process_now.create_time() - known["began"]) > 1
        return bool(is_another or process_now.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (ValueError, TypeError, KeyError):  # not as `this_process` writes it: times decide
        return False


def _machine() -> str:
    """Returns an identity of the machine or container in which process numbers count."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
        # Machines may share a host name, and all have the same name for their first set of numbers.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {numbers}"
