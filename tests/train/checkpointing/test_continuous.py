"""Chunks whose checkpoints follow each other: the same bits, and what retention leaves of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from baton.train import attempt
from tests.support import tiny
from tests.train.resuming import Chunks

LAST = 12
SETTINGS = {"optimizer": "adamw_torch", "max_steps": LAST, "learning_rate": 0.01}


class Drawing(TrainerCallback):
    """Draws a number after each step, as dropout would, and moves a weight by it."""

    stateless = True

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Draws."""
        next(iter(model.parameters())).data.flatten()[0] += float(torch.rand(1)) * 1e-3


class Arriving(TrainerCallback):
    """Lets what is on its way arrive before a step ends, so that the steps that are saved are the same each time."""

    stateless = True
    chunks: Chunks

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Waits."""
        while not self.chunks.checkpointer.committer.uploader.is_idle:
            time.sleep(0.01)


@pytest.fixture
def make(tiny_base: str, tmp_path: Path) -> Callable[..., Chunks]:
    """Returns what makes a run."""

    def made(name: str, targets: tuple[int, ...] = (LAST,), **chunks: Any) -> Chunks:
        given = tiny.recipe(tiny_base, training=SETTINGS, evaluation={"samples": 0}, chunks=chunks)
        arriving = type("Arriving", (Arriving,), {})
        arriving.chunks = made_chunks = Chunks(given, tmp_path, name, targets, (Drawing, arriving))
        return made_chunks

    return made


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets checkpoints cost what they like."""
    monkeypatch.setattr(attempt, "STALL", float("inf"))
    monkeypatch.setattr(attempt, "COST", float("inf"))


@pytest.mark.usefixtures("free")
def test_one_follows_the_other_and_none_changes_a_bit(make: Callable[..., Chunks]) -> None:
    whole = make("whole")
    whole.train_all()
    chunks = make("continuous", (7, LAST), checkpoint_every="continuous", keep={"last": 99})
    chunks.train_all()
    # Two steps beside no upload are known after the third of a process, the first being none to learn from.
    assert chunks.steps == [4, 5, 6, 7, 11, 12]
    assert whole.steps == [LAST]
    assert chunks.at().meta.state == whole.at().meta.state


@pytest.mark.usefixtures("free")
def test_one_between_is_resumed_from(make: Callable[..., Chunks]) -> None:
    whole = make("whole")
    whole.train_all()
    ends = {}
    for name, left_out in (("resumed", ()), ("control", ("rng",))):
        chunks = make(name, checkpoint_every="continuous", keep={"last": 99})
        chunks.train_all()
        for step in chunks.steps[3:]:  # as if the process had died before these
            chunks.run.storage.remove(f"{chunks.store.prefix(step)}/manifest.json")
        assert chunks.steps == [4, 5, 6]
        chunks.train(1, leave_out=left_out)
        assert chunks.at().meta.restored.step == 6
        ends[name] = chunks.at().meta.state
    assert ends["resumed"] == whole.at().meta.state
    assert ends["control"]["weights"] != whole.at().meta.state["weights"]


@pytest.mark.usefixtures("free")
def test_old_ones_go(make: Callable[..., Chunks]) -> None:
    chunks = make("retention", (9, LAST), checkpoint_every="continuous", keep={"last": 1, "best": 0})
    chunks.train(1)
    assert chunks.steps == [8, 9], "at its target the checkpoint stage does it"


def test_what_holds_training_for_long_waits(make: Callable[..., Chunks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "STALL", 1e-9)
    chunks = make("dear", checkpoint_every="continuous", keep={"last": 99})
    chunks.train(1)
    assert chunks.steps == [4, LAST], "the first one tells what they cost"
