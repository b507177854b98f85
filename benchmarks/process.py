"""Child processes, watched: events, memory, and an end at a chosen moment. Also the load by everything else here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PERIOD = 0.05
"""Seconds between two looks at a child's memory."""
LOOK = 5.0
"""Seconds between two looks at the processor time of all other processes."""

FRONT = "BATON_BENCH_FRONT"
"""Variable with the address by which children reach the server, where it is not that of this process."""

Event = dict[str, Any]


class ChildFailed(Exception):  # noqa: N818
    """A child ended with its own error."""


@dataclass
class Trace:
    """What was seen of a child.

    Attributes:
        spawned: Time at which it was started.
        ended: Time at which it was gone.
        events: What it told, each with its own time as `at`, and the seconds that its first thread and the process had
            had of the processor when it came, as `thread_cpu` and `process_cpu`.
        peak_memory: The most memory that it held, VmHWM.
        peak_folder: The most bytes that there were in its folder.
        peak_both: The most that its memory and its folder were at one moment.
        terminated: Time of its SIGTERM, 0 without one.
        is_killed: Whether it was killed.
    """

    spawned: float
    ended: float = 0.0
    events: list[Event] = field(default_factory=list)
    peak_memory: int = 0
    peak_folder: int = 0
    peak_both: int = 0
    terminated: float = 0.0
    is_killed: bool = False

    @property
    def seconds(self) -> float:
        """Time from start to end."""
        return self.ended - self.spawned

    def all(self, kind: str, **fields: Any) -> list[Event]:
        """Returns the events of a kind with these values."""
        return [x for x in self.events if x["event"] == kind and all(x.get(key) == fields[key] for key in fields)]

    def at(self, kind: str, last: bool = False, **fields: Any) -> float:
        """Returns the time of the first such event, or of the last.

        Raises:
            ChildFailed: there is none.
        """
        found = self.all(kind, **fields)
        if not found:
            raise ChildFailed(f"no event {kind} {fields} came, only {[x['event'] for x in self.events]}")
        return float(found[-1 if last else 0]["at"])


def child_environment() -> dict[str, str]:
    """Returns the environment of a child that reaches the server."""
    front = os.environ.get(FRONT)
    return {**os.environ, **({"AWS_ENDPOINT_URL": front} if front else {})}


def watch(
    command: Sequence[str],
    parse: Callable[[str], Event | None],
    *,
    folder: str = "",
    environment: dict[str, str] | None = None,
    until: Callable[[Event], bool] = lambda event: False,
    after: float | None = None,
    terminate: Callable[[Event], bool] = lambda event: False,
) -> Trace:
    """Runs a child to its end, or kills it.

    Args:
        command: What to run with this interpreter.
        parse: Returns the event in a line that the child prints.
        folder: Where the child puts its files, to see how large they get.
        environment: What is different from our own.
        until: Tells at which event to kill it.
        after: Seconds after its start at which to kill it.
        terminate: Tells at which event to send SIGTERM, once; it has to end by itself.

    Raises:
        ChildFailed: it ended with an error before it was to be killed.
    """
    killed = threading.Event()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        trace = Trace(spawned=time.time())
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**child_environment(), "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
        timer = threading.Timer(after or 0, _kill, (process, killed))
        sampler = threading.Thread(target=_sample, args=(process, folder, trace), daemon=True)
        sampler.start()
        if after is not None:
            timer.start()
        try:
            _listen(process, parse, until, terminate, killed, trace)
        finally:
            timer.cancel()
            _kill(process, threading.Event())
        trace.ended, trace.is_killed = time.time(), killed.is_set()
        sampler.join()
        if process.returncode and not killed.is_set():
            errors.seek(0)
            raise ChildFailed(f"{' '.join(command)} ended with code {process.returncode}: {errors.read()[-2000:]}")
    return trace


def _listen(
    process: subprocess.Popen[str],
    parse: Callable[[str], Event | None],
    until: Callable[[Event], bool],
    terminate: Callable[[Event], bool],
    killed: threading.Event,
    trace: Trace,
) -> None:
    """Collects what a child tells until it is gone, and ends it where it is to be killed."""
    assert process.stdout
    for line in process.stdout:
        event = parse(line)
        if event and not killed.is_set():
            trace.events.append({**event, **_spent(process.pid)})
            if until(event):
                _kill(process, killed)
            elif not trace.terminated and terminate(event):
                trace.terminated = time.time()
                process.terminate()
    process.wait()


def _kill(process: subprocess.Popen[str], killed: threading.Event) -> None:
    if process.poll() is None:
        killed.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _sample(process: subprocess.Popen[str], folder: str, trace: Trace) -> None:
    while process.poll() is None:
        now, peak = _memory(process.pid)
        files = folder_bytes(folder) if folder else 0
        trace.peak_memory = max(trace.peak_memory, peak)
        trace.peak_folder = max(trace.peak_folder, files)
        trace.peak_both = max(trace.peak_both, now + files + _held(process.pid))
        time.sleep(PERIOD)


def _spent(pid: int) -> dict[str, float]:
    """Returns the processor time of a process's first thread and of all of it; nothing where it is gone."""
    with contextlib.suppress(OSError, psutil.Error), open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        # For a process this file tells of its first thread alone, in nanoseconds.
        times = psutil.Process(pid).cpu_times()
        return {"thread_cpu": int(file.read().split()[0]) / 1e9, "process_cpu": times.user + times.system}
    return {}


def _memory(pid: int) -> tuple[int, int]:
    """Returns what a process holds without the files in memory that it maps, and the most that it ever held in all."""
    found = {"VmRSS:": 0, "RssShmem:": 0, "VmHWM:": 0}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, rest = line.partition("\t")
            if key in found:
                found[key] = int(rest.split()[0]) * 1024
    return found["VmRSS:"] - found["RssShmem:"], found["VmHWM:"]


def _held(pid: int) -> int:
    """Returns the bytes of memory files without a folder that a process has open or maps, each counted once."""
    held: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
            if "/memfd:" in line:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                held[int(line.split()[4])] = end - begin
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith("/memfd:"):
                    state = os.stat(entry.path)
                    held[state.st_ino] = max(held.get(state.st_ino, 0), state.st_blocks * 512)
    return sum(held.values())


class OtherLoad:
    """The processor time of all processes but this one, its descendants and the server's, from its making on.

    Args:
        names: Names of processes that count as the server's, such as `ceph-osd`.
        pids: Returns the server's other processes.
    """

    def __init__(self, names: Collection[str], pids: Callable[[], Collection[int]]) -> None:
        self._names, self._pids, self._own = names, pids, set[int]()
        self._began, self._seconds = time.monotonic(), 0.0
        self._last = self._look()
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> float:
        """Returns the cores that were busy with others, on average."""
        self._over.set()
        self._add()
        return self._seconds / (time.monotonic() - self._began)

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            self._add()

    def _add(self) -> None:
        last, self._last = self._last, self._look()
        self._seconds += sum(spent - last.get(pid, 0.0) for pid, spent in self._last.items())

    def _look(self) -> dict[int, float]:
        # A descendant stays one after its parent's death, until it is gone.
        self._own &= set(psutil.pids())
        self._own |= {os.getpid(), *self._pids(), *(child.pid for child in psutil.Process().children(recursive=True))}
        found = {}
        for process in psutil.process_iter(["cpu_times", "name"]):
            times = process.info["cpu_times"]
            if process.pid not in self._own and process.info["name"] not in self._names and times:
                found[process.pid] = times.user + times.system
        return found


def folder_bytes(folder: str) -> int:
    """Returns how much room the files below a folder take; what its links lead to lies elsewhere."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
