"""fp16's gradient scaler on a CPU: its state travels through chunks, kills, and an overflow at a chunk's edge."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from tests.exactness.matrix import Cell, dropping, merge

pytestmark = pytest.mark.slow
FIRST_SCALE = 2.0**30
"""So large that gradients of the first steps overflow, and each of these steps halves it."""
METHODS = ("sft", "dpo", "grpo")


def cell(method: str, weights: str = "full") -> Cell:
    """Returns a method's cell in fp16, with a checkpoint after each step."""
    changes = dropping(method, 0.2) if weights == "lora" else {}
    half = {"precision": "fp16", "fp16_initial_scale": FIRST_SCALE}
    merge(changes, {"training": half, "resources": {"gpus": 1}, "chunks": {"checkpoint_every": 1}})
    return Cell(method, weights, "fp16 scaled", changes)


def train(run: Run, legs: Any, targets: Sequence[int] = (), leave_out: tuple[str, ...] = ()) -> None:
    """Runs a run's chunks, with these ends where some are given."""
    if targets:
        legs.cut(run, targets)
    for index in range(1, len(run.plan().targets) + 1):
        code, printed = legs.leg(legs.scaling_chunk, run.uri, index, leave_out)
        assert code == 0, printed


def scales(run: Run) -> dict[int, float]:
    """Returns the scale in each checkpoint of a run."""
    store = CheckpointStore(run)
    files = {each.step: each.manifest.path(store.prefix(each.step), "scaler.pt") for each in store.committed()}
    return {step: torch.load(store.storage.key(path), weights_only=True)["scale"] for step, path in files.items()}


@pytest.fixture(scope="module")
def whole(grid: Any, legs: Any) -> Any:
    """Returns a cell's run in one chunk, and the last of its first steps, which all overflow."""
    runs: dict[str, tuple[Run, int]] = {}

    def trained(of: Cell) -> tuple[Run, int]:
        if of.name not in runs:
            run = legs.prepare(grid(of), f"{of.name}-whole")
            train(run, legs)
            found = {0: FIRST_SCALE, **scales(run)}
            overflow = next(step for step in range(of.steps) if found[step + 1] == found[step])
            assert 3 <= overflow < of.steps - 3, found
            runs[of.name] = run, overflow
        return runs[of.name]

    return trained


@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_the_scale_travels_through_chunks_that_end_around_an_overflow(
    method: str, weights: str, grid: Any, whole: Any, legs: Any
) -> None:
    of = cell(method, weights)
    run, overflow = whole(of)
    for name, targets in (
        ("before", (overflow - 1, of.steps)),
        ("at", (overflow, of.steps)),
        ("all around", (overflow - 1, overflow, overflow + 1, of.steps)),
    ):
        parts = legs.prepare(grid(of), f"{of.name}-{name.replace(' ', '-')}")
        train(parts, legs, targets)
        assert scales(parts) == scales(run), name
        assert legs.losses(parts) == legs.losses(run), name
        assert legs.final(parts).meta.state == legs.final(run).meta.state, name
        assert legs.final(parts).meta.restored.checked["scaler"] == "match"


@pytest.mark.parametrize("after", [-1, 0, 1], ids=["before it", "at it", "after it"])
def test_a_kill_around_an_overflow_leaves_no_trace(after: int, grid: Any, whole: Any, legs: Any) -> None:
    of = cell("sft")
    run, overflow = whole(of)
    killed = legs.prepare(grid(of), f"{of.name}-killed-{after + 1}")
    code, printed = legs.leg(legs.scaling_chunk, killed.uri, 1, (), f"step:{overflow + after}")
    assert code == -signal.SIGKILL, printed
    train(killed, legs)
    assert scales(killed) == scales(run)
    assert legs.final(killed).meta.state == legs.final(run).meta.state


@pytest.mark.parametrize("method", METHODS)
def test_a_chunk_that_forgets_the_scale_overflows_again(method: str, grid: Any, whole: Any, legs: Any) -> None:
    of = cell(method)
    run, overflow = whole(of)
    forgetful = legs.prepare(grid(of), f"{of.name}-forgetful")
    train(forgetful, legs, (overflow + 1, of.steps), leave_out=("scaler",))
    assert legs.final(forgetful).meta.restored.checked["scaler"] == "left out"
    assert scales(forgetful)[overflow + 2] == FIRST_SCALE / 2
    assert legs.final(forgetful).meta.state["weights"] != legs.final(run).meta.state["weights"]
