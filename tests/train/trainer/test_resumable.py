"""What the mixin for exact resume does at a batch, an evaluation, and the restore of a fork."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.models.train_rows import IGNORED
from baton.train.distributed import Watchdog
from baton.train.samplers import DistributedBatches
from baton.train.trainer import exact_class
from baton.train.weighing import DealtRows
from tests.support import tiny
from tests.train.resuming import ROWS, Chunks

SETTINGS = {"optimizer": "adamw_torch", "max_steps": 5, "learning_rate": 0.01, "lr_scheduler": "linear"}


class Beats(Watchdog):
    """Notes signs of life."""

    def __init__(self) -> None:
        super().__init__()
        self.doing: list[str] = []

    def heartbeat(self, doing: str, step: int | None = None) -> None:
        """Notes it."""
        self.doing.append(doing)


@pytest.fixture
def make(tiny_base: str, tmp_path: Path) -> Callable[..., Any]:
    """Returns what builds a trainer."""

    def made(method: str = "sft") -> Any:
        given = tiny.recipe(tiny_base, training={**SETTINGS, "method": method}, evaluation={"samples": 0, "every": 2})
        rows = tiny.tokens(given, ROWS if method == "sft" else tiny.PAIRS)
        return tiny.trainer(given, rows.select(range(5)), tmp_path, rows.select(range(2)))

    return made


def test_an_evaluation_gives_signs_of_life(make: Callable[..., Any]) -> None:
    trainer = make()
    trainer.watchdog = Beats()
    trainer.evaluate()
    assert trainer.watchdog.doing[0] == "evaluation"
    assert set(trainer.watchdog.doing) == {"evaluation", "forward pass", "backward pass"}


def as_second_of_two(trainer: Any, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a trainer take itself for the second of two processes; five rows are a step of four and one of one."""
    trainer.__class__ = exact_class(type(trainer), [DealtRows])
    trainer._batches = DistributedBatches(range(5), batch_size=4, micro=2, world_size=2)
    monkeypatch.setattr(type(trainer.args), "process_index", property(lambda _: 1))
    trainer.state.global_step = step


@pytest.mark.parametrize(("step", "blank"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_row_that_only_fills_up_counts_for_nothing(
    step: int, blank: bool, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make()
    as_second_of_two(trainer, step, monkeypatch)
    batch = {"labels": torch.tensor([[1, 2, IGNORED]])}
    trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    assert batch["labels"].tolist() == [[1, 2, IGNORED]], "asked of what was not fetched for a step, such as a round"
    trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert batch["labels"].tolist() == [[IGNORED] * 3 if blank else [1, 2, IGNORED]]
    trainer._get_num_items_in_batch([{"labels": batch["labels"]}], torch.device("cpu"))


def test_where_rows_are_averaged_each_pass_has_its_share(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make("dpo")
    batch = next(iter(trainer.get_train_dataloader()))
    as_second_of_two(trainer, 1, monkeypatch)
    trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert list(trainer._shares) == trainer._batches.shares(1, 1) == [0.0]


def test_a_fork_is_restored_with_its_own_rate(tiny_base: str, tmp_path: Path) -> None:
    def run(name: str, rate: float) -> Chunks:
        settings = {**SETTINGS, "learning_rate": rate}
        given = tiny.recipe(tiny_base, training=settings, evaluation={"samples": 0}, chunks={"keep": {"last": 9}})
        return Chunks(given, tmp_path, name, (2, 5))

    parent = run("parent", 0.01)
    parent.train_all()
    fork = run("fork", 0.005)
    fork.run, fork.store = parent.run, parent.store
    path = parent.store.prefix(2) + "/manifest.json"
    manifest = json.loads(parent.run.storage.read(path))
    changed = {"training.learning_rate": [0.01, 0.005]}
    manifest["meta"]["forked_from"] = {"run_uri": "parent", "step": 2, "digest": "d", "changed": changed}
    parent.run.storage.write(path, json.dumps(manifest).encode())
    before = {entry["step"]: entry["learning_rate"] for entry in parent.logged() if "learning_rate" in entry}
    for name in parent.run.storage.find(parent.store.prefix(5)):
        parent.run.storage.remove(f"{parent.store.prefix(5)}/{name}")
    fork.train(2)
    after = {entry["step"]: entry["learning_rate"] for entry in fork.logged() if "learning_rate" in entry}
    assert [after[step] for step in (1, 2)] == [before[step] for step in (1, 2)]
    assert [after[step] for step in (3, 4, 5)] == pytest.approx([before[step] / 2 for step in (3, 4, 5)])
    assert set(fork.at(5).meta.restored.checked.values()) == {"match", "absent"}  # type: ignore[union-attr]
