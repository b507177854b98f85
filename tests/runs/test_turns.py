"""One retraining at a time: among real processes, in a folder and in S3, and when a holder dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from baton.errors import DamagedError
from baton.retrain import PROCESS, RetrainLock, this_process
from baton.store.storage import Storage

TAKER = """
import os, sys, time
from baton.store.storage import Storage
from baton.errors import DamagedError
from baton.retrain import PROCESS, RetrainLock, this_process

store, owner, wait, log, known, held = sys.argv[1:]
if known == "known":
    os.environ[PROCESS] = this_process()
lock = RetrainLock(Storage(store), "model", owner)
print("ready", flush=True)
sys.stdin.readline()
taken = lock.acquire(wait=wait == "wait", expires_s=3600)
if taken and log:
    with open(log, "a") as file:
        file.write(f"{owner} begins\\n")
        file.flush()
        time.sleep(float(held))
        file.write(f"{owner} ends\\n")
    lock.release()
print(taken, flush=True)
sys.stdin.readline()
"""


def _started(
    store: str, owner: str, *, wait: bool = False, log: str = "", known: bool = False
) -> subprocess.Popen[str]:
    arguments = [store, owner, "wait" if wait else "try", log, "known" if known else "unknown", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-c", TAKER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process


def _answers(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Lets processes that are ready go at once, and returns what each found."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [process.stdout.readline().strip() for process in processes if process.stdout]
    for process in processes:
        process.communicate("\n", timeout=20)
    return found


def test_of_processes_that_ask_at_once_one_gets_the_turn(store: str) -> None:
    found = _answers([_started(store, f"owner-{number}") for number in range(4)])
    assert sorted(found) == ["False"] * 3 + ["True"]


def test_those_that_queue_come_one_after_the_other(store: str, tmp_path: str) -> None:
    log = os.path.join(tmp_path, "log")
    found = _answers([_started(store, f"owner-{number}", wait=True, log=log) for number in range(3)])
    assert found == ["True"] * 3
    with open(log, encoding="utf-8") as file:
        lines = file.read().splitlines()
    assert len(lines) == 6
    for begins, ends in zip(lines[::2], lines[1::2], strict=True):
        assert (begins.split()[1], ends) == ("begins", f"{begins.split()[0]} ends")


def _killed(store: str, *, known: bool) -> None:
    """Leaves a turn behind whose process was killed."""
    process = _started(store, "killed", known=known)
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "True\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()


def _pause(store: str) -> float:
    """Lets time pass in which nothing is written, and returns the seconds; an object store tells whole ones."""
    seconds = 2.5 if store.startswith("s3") else 0.6
    time.sleep(seconds)
    return seconds


def test_the_turn_of_a_process_known_to_be_dead_is_over(store: str) -> None:
    _killed(store, known=True)
    assert RetrainLock(Storage(store), "model", "next").acquire(wait=False, expires_s=3600)


def test_the_turn_of_a_pod_that_is_gone_is_over_when_it_shows_no_sign_of_life(store: str) -> None:
    _killed(store, known=False)
    storage = Storage(store)
    following = RetrainLock(storage, "model", "next")
    assert not following.acquire(wait=False, expires_s=3600)
    pause = _pause(store)
    assert not following.acquire(wait=False, expires_s=pause + 2)
    assert following.acquire(wait=False, expires_s=pause / 2)
    assert RetrainLock(storage, "model", "killed")._ours() is None


def test_a_step_that_a_chunk_notes_is_a_sign_of_life(store: str) -> None:
    storage = Storage(store)
    holder = RetrainLock(storage, "model", "holder")
    assert holder.acquire(wait=False, expires_s=3600)
    holder.note_runs(["trained"])
    pause = _pause(store)
    storage.write("runs/trained/progress.json", b"{}")
    following = RetrainLock(storage, "model", "next")
    assert not following.acquire(wait=False, expires_s=pause / 2)
    storage.remove("runs/trained/progress.json")
    assert following.acquire(wait=False, expires_s=pause / 2)


def test_a_stage_that_is_started_again_still_has_the_turn_and_another_waits(store: str) -> None:
    storage = Storage(store)
    assert RetrainLock(storage, "model", "one").acquire(wait=False, expires_s=3600)
    assert RetrainLock(storage, "model", "one").acquire(wait=False, expires_s=3600)
    assert not RetrainLock(storage, "model", "two").acquire(wait=False, expires_s=3600)
    assert RetrainLock(storage, "another", "two").acquire(wait=False, expires_s=3600)


def test_a_turn_that_nobody_has_written_is_damage(store: str) -> None:
    storage = Storage(store)
    storage.write("models/model/turns/000001/turn.json", b"{")
    with pytest.raises(DamagedError, match=r"turns/000001/turn\.json is not a JSON object"):
        RetrainLock(storage, "model", "next").acquire(wait=False, expires_s=3600)


def test_runs_and_processes_that_nobody_has_written_are_no_signs_of_life(store: str) -> None:
    storage = Storage(store)
    odd = json.dumps({"owner": "odd", "at": "", "process": "{"}).encode()
    storage.write("models/model/turns/000001/turn.json", odd)
    storage.write("models/model/turns/000001/runs.json", b"3")
    following = RetrainLock(storage, "model", "next")
    assert not following.acquire(wait=False, expires_s=3600)
    assert following.acquire(wait=False, expires_s=_pause(store) / 2)


def test_who_has_lost_the_turn_cannot_end_that_of_the_next(store: str) -> None:
    storage = Storage(store)
    first, second = RetrainLock(storage, "model", "first"), RetrainLock(storage, "model", "second")
    assert first.acquire(wait=False, expires_s=3600)
    assert second.acquire(wait=False, expires_s=-1)
    first.release()
    assert second._ours()
    second.release()
    assert second._ours() is None
    assert first.acquire(wait=False, expires_s=3600)


def test_a_living_process_keeps_its_turn(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS, this_process())
    assert RetrainLock(Storage(store), "model", "holder").acquire(wait=False, expires_s=3600)
    assert not RetrainLock(Storage(store), "model", "next").acquire(wait=False, expires_s=3600)


@pytest.mark.parametrize(
    ("part", "is_taken"),
    [
        pytest.param(None, True, id="of this machine"),
        pytest.param(0, False, id="of another host name"),
        pytest.param(1, False, id="of a machine with the same host name"),
        pytest.param(2, False, id="of another container"),
    ],
)
def test_a_number_tells_of_processes_of_its_machine_alone(
    part: int | None, is_taken: bool, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = json.loads(this_process())
    parts = known["machine"].split()
    assert len(parts) == 3
    if part is not None:
        parts[part] = "other"
    died = subprocess.Popen(["true"])
    died.wait()
    monkeypatch.setenv(PROCESS, json.dumps({**known, "machine": " ".join(parts), "pid": died.pid}))
    assert RetrainLock(Storage(store), "model", "holder").acquire(wait=False, expires_s=3600)
    assert RetrainLock(Storage(store), "model", "next").acquire(wait=False, expires_s=3600) == is_taken
