"""kill -9 at any moment of a chunk: run again, it ends on the same bits."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import filelock
import pytest

from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.train import build

SLOW = {"start-up", "restore", "first-step", "digest"}
MOMENTS = {
    "start-up": ("phase:import", [5]),
    "restore": ("phase:restore", [5]),
    "first-step": ("step:6", [5]),
    "training": ("step:10", [5, 8]),
    "snapshot": ("writing:2", [5]),
    "digest": ("phase:save", [5]),
    "upload": ("sending:3", [5]),
    "commit": ("phase:commit", [5]),
    "after-commit": ("checkpoint:8", [5, 8]),
}
"""Where the second of three chunks dies, and the steps that are committed then."""


@pytest.mark.parametrize(
    ("moment", "survives"),
    [pytest.param(*of, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, of in MOMENTS.items()],
)
def test_a_killed_chunk_is_made_good(
    moment: str, survives: list[int], recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    recipe = legs.changed(recipes["lora"], chunks__count=3)
    run = legs.prepare(recipe, f"killed-{moment.replace(':', '-')}")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    code, printed = legs.leg(legs.chunk, run.uri, 2, (), moment)
    assert code == -signal.SIGKILL, printed
    committed = {found.step: found for found in CheckpointStore(run).committed() if found.step >= 5}
    assert sorted(committed) == survives
    assert not any(CheckpointStore(run).verify(checkpoint) for checkpoint in committed.values())
    legs.train(run)
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state


@pytest.mark.slow
def test_a_kill_while_torch_compiles_leaves_nothing_that_a_start_fails_at(
    recipes: dict[str, Recipe], legs: Any, tmp_path: Path
) -> None:
    recipe = legs.changed(recipes["scratch"], training__compile=True, chunks__count=1)
    killed, whole = (legs.prepare(recipe, f"compiled-{name}") for name in ("killed", "whole"))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def command(run: Run) -> list[str]:
        return [sys.executable, "-c", f"from tests.exactness import legs; legs.chunk({run.uri!r}, 1)"]

    first = subprocess.Popen(command(killed), env=environment, start_new_session=True)
    while not (left := [path for path in tmp_path.glob("*/*_CxxBuild") if _library(path).exists()]):
        assert first.poll() is None
        time.sleep(0.005)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    with pytest.raises(OSError, match=r"file too short|invalid ELF header"):  # a start would meet this
        ctypes.CDLL(str(_library(left[0])))
    for run in (killed, whole):
        assert subprocess.run(command(run), env=environment, check=False).returncode == 0
    assert not list(tmp_path.glob("*/*_CxxBuild"))
    assert legs.final(killed).meta.state == legs.final(whole).meta.state


def _library(folder: Path) -> Path:
    return folder.with_name(folder.name.removesuffix("_CxxBuild") + ".so")


def test_only_unfinished_kernels_are_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    for name in ("done", "left", "busy"):
        (tmp_path / f"ab/{name}.main.cpp").touch()
        (tmp_path / f"ab/{name}.main.so").touch()
        if name != "done":
            (tmp_path / f"ab/{name}.main_CxxBuild").mkdir()
    (tmp_path / "locks").mkdir()
    with filelock.FileLock(tmp_path / "locks/busy.lock"):
        build.discard_unfinished_kernels()
    there = {path.name for path in (tmp_path / "ab").iterdir()}
    sources = {f"{name}.main.cpp" for name in ("done", "left", "busy")}
    assert there == sources | {"done.main.so", "busy.main.so", "busy.main_CxxBuild"}
