"""A store that is away, and no room to stage: training continues, says so, and ends on the same bits."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton import events
from baton.recipe.recipe import Recipe
from baton.runs.run import Run


@pytest.fixture
def aside(legs: Any) -> Any:
    """Legs that run beside the test."""
    return importlib.import_module("background")


def _changed(legs: Any, recipe: Recipe, store: str, **chunks: Any) -> Recipe:
    values = {"count": 2, "checkpoint_every": 2, "wait_for_commit": False, **chunks}
    return legs.changed(recipe, store={"uri": store}, **{f"chunks__{key}": value for key, value in values.items()})


def _require_undisturbed(run: Run, undisturbed: dict[str, Run], legs: Any) -> None:
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state


@pytest.mark.s3
def test_training_goes_on_while_the_store_is_away(
    faulty_s3: Any, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, aside: Any
) -> None:
    run = legs.prepare(_changed(legs, recipes["lora"], faulty_s3.store), "outage")
    chunk = aside.Background(aside.slow_chunk, run.uri, 1, 0.8, 0.5)
    chunk.wait_for(events.CheckpointCommitted)
    with faulty_s3.proxy.outage():
        away = chunk.wait_for(events.StoreUnavailable)
        chunk.wait_for(events.Step, step=6)
        assert chunk.process.is_alive()
    assert chunk.wait() == 0, chunk.printed
    assert away.step < run.plan().targets[0]
    assert legs.leg(legs.chunk, run.uri, 2)[0] == 0
    _require_undisturbed(run, undisturbed, legs)


@pytest.mark.slow
@pytest.mark.s3
def test_the_bound_on_unsaved_work_ends_a_chunk_with_one_message(
    faulty_s3: Any, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, aside: Any
) -> None:
    run = legs.prepare(_changed(legs, recipes["lora"], faulty_s3.store, max_unsaved="2s"), "long-outage")
    chunk = aside.Background(aside.slow_chunk, run.uri, 1, 0.5, 0.5)
    chunk.wait_for(events.CheckpointCommitted)
    with faulty_s3.proxy.outage():
        assert chunk.wait() == 2
    message = chunk.wait_for(events.Error).message
    assert "cannot be reached" in message
    assert "chunks.max_unsaved is 2 s" in message
    assert "Traceback" not in chunk.printed
    for index in (1, 2):
        code, printed = legs.leg(legs.chunk, run.uri, index)
        assert code == 0, printed
    _require_undisturbed(run, undisturbed, legs)


@pytest.mark.s3
def test_rights_taken_away_end_a_chunk_at_once(
    faulty_s3: Any, recipes: dict[str, Recipe], legs: Any, aside: Any
) -> None:
    run = legs.prepare(_changed(legs, recipes["lora"], faulty_s3.store), "no-rights")
    chunk = aside.Background(aside.slow_chunk, run.uri, 1, 0.2, 5.0)
    chunk.wait_for(events.CheckpointCommitted)
    faulty_s3.proxy.status(403, methods="PUT")
    assert chunk.wait(30) == 2
    assert "access denied" in chunk.wait_for(events.Error).message


@pytest.mark.slow
@pytest.mark.s3
def test_a_bad_day_of_all_faults_changes_no_bit(
    faulty_s3: Any, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    run = legs.prepare(_changed(legs, recipes["lora"], faulty_s3.store), "bad-day")
    rules = [
        faulty_s3.proxy.status(503, "SlowDown", chance=0.1, seed=1),
        faulty_s3.proxy.status(500, chance=0.05, seed=2),
        faulty_s3.proxy.reset(chance=0.05, seed=3),
        faulty_s3.proxy.lost_answer(methods="PUT", chance=0.1, seed=4),
        faulty_s3.proxy.short(after=100, methods="GET", chance=0.05, seed=5),
    ]
    for index in (1, 2):
        for function in (legs.chunk, legs.verify_chunk):
            code, printed = legs.leg(function, run.uri, index)
            assert code == 0, printed
    assert sum(rule.hits for rule in rules) > 10
    faulty_s3.proxy.clear()
    _require_undisturbed(run, undisturbed, legs)


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Iterator[str]:
    """A file system of 100 kB, too small for any checkpoint here."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield str(folder)
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("disk_full", "said"),
    [(False, "it is staged in"), (True, "it is uploaded file by file")],
    ids=["memory full", "memory and disk full"],
)
def test_no_room_to_stage_falls_back_and_says_so(
    disk_full: bool,
    said: str,
    tiny_folder: str,
    recipes: dict[str, Recipe],
    undisturbed: dict[str, Run],
    legs: Any,
    aside: Any,
) -> None:
    name = "full-memory-and-disk" if disk_full else "full-memory"
    run = legs.prepare(_changed(legs, recipes["lora"], recipes["lora"].store.uri), name)
    for index in (1, 2):
        code, printed = legs.leg(aside.chunk_staged_in, run.uri, index, tiny_folder, tiny_folder if disk_full else None)
        assert code == 0, printed
        assert said in printed
    assert os.listdir(tiny_folder) == []
    restored = legs.final(run).meta.restored
    assert (restored.step, restored.skipped) == (run.plan().targets[0], [])
    _require_undisturbed(run, undisturbed, legs)


def test_a_file_system_that_fills_up_while_it_is_written_to(
    tiny_folder: str, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, aside: Any
) -> None:
    """The estimate said there was room; another process took it."""
    run = legs.prepare(_changed(legs, recipes["lora"], recipes["lora"].store.uri), "full-meanwhile")
    for index in (1, 2):
        code, printed = legs.leg(aside.chunk_staged_in, run.uri, index, tiny_folder, None, True)
        assert code == 0, printed
    _require_undisturbed(run, undisturbed, legs)
