"""Runs from where this process may not have children, and two at once: each as the only one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

import baton
from baton.kfp import processes
from baton.local import engine, forkserver

RECIPE = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
BEGIN = """
import json, multiprocessing, sys, threading
import baton

RECIPE, STORE = sys.argv[1:3]
SETTINGS = {"training.max_steps": 2, "training.epochs": None, "evaluation.samples": 0, "evaluation.every": None}

def run(name):
    heard = []
    loaded = baton.load(RECIPE, SETTINGS, store=STORE, chunks=1)
    try:
        result = baton.run(loaded, name, on_event=heard.append)
    except baton.BatonError as error:
        return name, type(error).__name__, str(error), 0
    started = sum(event.kind == "checkpoint" for event in heard)
    return name, result["state"], result["checkpoints"][-1]["digest"], started

"""
POOL = """
if __name__ == "__main__":
    with multiprocessing.get_context("METHOD").Pool(1) as pool:
        print(json.dumps([pool.apply(run, ("alone",))]))
"""
THREADS = """
names, told = ("one", "other"), []
begin = threading.Barrier(len(names))

def work(name):
    begin.wait()
    told.append(run(name))

threads = [threading.Thread(target=work, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(told))
"""


def _told(script: str, folder: Path) -> dict[str, tuple[str, str, int]]:
    """Returns what the runs of a script came to, by name."""
    (folder / "script.py").write_text(BEGIN + script)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), RECIPE, str(folder / "store")],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (state, words, events) for name, state, words, events in json.loads(done.stdout.splitlines()[-1])}


def _launcher(_: int) -> str:
    return forkserver.launcher().__name__


def test_a_daemonic_process_starts_stages_as_fresh_interpreters() -> None:
    assert forkserver.launcher() is forkserver.ForkedProcess
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_launcher, [0]) == [processes.FreshProcess.__name__]


@pytest.mark.parametrize("is_taken", [False, True], ids=["alone", "beside another"])
def test_a_mistake_is_told_alike(is_taken: bool, tmp_path: Path) -> None:
    wrong = {"model.from_scratch.architecture": "llamma"}
    local = baton.LocalRun.of(baton.load(RECIPE, wrong, store=str(tmp_path / "store")), "mistaken")
    told = pytest.raises(baton.UserError, match=r"^model\.from_scratch\.architecture 'llamma' is not a model type")
    with engine._taken if is_taken else contextlib.nullcontext(), told:
        local.start()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_from_a_worker_of_a_pool(method: str, tmp_path: Path) -> None:
    told = _told(POOL.replace("METHOD", method), tmp_path)
    assert told["alone"][0] == "succeeded", told


@pytest.mark.slow
def test_at_once_in_one_process(tmp_path: Path) -> None:
    told = _told(THREADS, tmp_path)
    (one, digest, heard), (other, same, also) = told["one"], told["other"]
    assert (one, other) == ("succeeded", "succeeded"), told
    # Each has its own events, and the bits of the other.
    assert (digest, heard) == (same, also)
    assert heard == 1
