"""One retraining of a model at a time: a lock in the store, which one retraining after the other has for its turn.

    models/<name>/turns/000007/turn.json     who has it: put-if-absent, so one of any number of takers gets it
    models/<name>/turns/000007/runs.json     the runs that it trains
    models/<name>/turns/000007/ended.json    it is over

A turn is over when it says so, when its process is known to be dead, or when nothing of it was written for as long as
it is good for: to the turn or to its runs, where a chunk that trains notes its step every ten seconds. Times are those
that the store gives to its objects, its own time now among them, so that clocks need not agree.

A holder that was only asleep may wake after its time. It cannot do harm: checkpoints are bundles, and `accepted` takes
one model of two that were judged against the same.
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
"""Environment variable: the process whose end is the end of the turn, as `this_process` writes it."""
_CLOCK = "clock-"
_LONGEST_PAUSE = 30.0


class LockHolder(Document):
    """The owner of a turn, since when, and the process whose end is the turn's."""

    owner: str
    at: str
    process: str | None = None


class RetrainLock:
    """The lock of one model; `owner` has a name that a restarted stage of the same retraining has too."""

    def __init__(self, storage: Storage, name: str, owner: str) -> None:
        self._storage, self._owner = storage, owner
        self._folder = f"models/{name}/turns"

    def acquire(
        self, *, wait: bool, expires_s: float, on_wait: Callable[[LockHolder], None] = lambda holder: None
    ) -> bool:
        """Acquires the lock, for one owner at a time, and tells whether it is ours now; always, when waiting.

        A holder counts as gone after `expires_s` seconds without a sign of life. `on_wait` is called once for each
        other that is waited for.
        """
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
        """Returns the turn that is under way and its holder: this owner's where no other's is."""
        while True:
            number = self._newest()
            holder = self._holder(number)
            if holder is None:  # the first, or one that is being written
                self._begin(max(number, 1))
                continue  # whose it is, is read back
            is_over = self._is_over(number)
            # A stage of this retraining that was started again: the turn is its own still.
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
            # Not noted yet, or not as it was written: no signs of life either way.
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                runs = [str(run) for run in load(self._storage.read(f"{self._path(number)}/runs.json"))]
            for run in runs:
                signs += [at for _, at in self._storage.find(f"runs/{run}").values()]
        except FileNotFoundError:  # somebody renamed a file while its folder was gone through
            return False
        finally:
            self._storage.remove(clock)
        # `signs` has the turn itself at least, which `_claimed` has read.
        return (present - max(signs)).total_seconds() > expires_s


def this_process() -> str:
    """Returns what identifies this process on this machine, also after its number was given to another."""
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
    except (ValueError, TypeError, KeyError):  # nobody's: what is known is when it was written
        return False


def _machine() -> str:
    """Returns the machine, or the container, in which process numbers mean the same."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
        # Machines may share a host name, and all have the same name for their first set of numbers.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {numbers}"
