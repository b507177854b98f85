"""What Baton does with DeepSpeed's optimizer: what it keeps of it, restores into it, and in what order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.checkpoint import zero_format as files
from baton.checkpoint.digest import tree_digest
from baton.train.protocol import Resumption
from baton.train.sharding import MASTERS, OPTIMIZER_STATES, Partitioning, Zero, weight_sizes
from tests.support import tiny
from tests.train.trainer.test_joining import begin

ROWS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in tiny.PAIRS]
KEPT = {"overflow": False, "ds_version": "0.19.8"}
NAMES = {
    2: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    3: ("fp32_flat_groups", "optimizer_state_dict"),
}
"""By stage, the names that DeepSpeed has for masters and the optimizer's own state."""


class Engine:
    """What passes for DeepSpeed's optimizer of one process, which notes what it is asked for.

    Args:
        stage: Its stage.
        weights: What is trained.
    """

    def __init__(self, stage: int, weights: list[torch.nn.Parameter]) -> None:
        self.stage, self.weights = stage, weights
        self.loss_scaler = "its scaler"
        self.asked: list[Any] = []
        if stage == 3:
            self.fp16_groups = [weights]
            self.fp32_partitioned_groups_flat = [torch.cat([weight.data.flatten() for weight in weights])]
            for weight in weights:
                weight.ds_tensor, weight.ds_numel = weight.data.flatten(), weight.numel()
        else:
            self.bit16_groups = [weights]

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, as far as it is looked at."""
        rows, (masters, states) = Partitioning(self.stage, weight_sizes([self.weights]), 1).rows[0], NAMES[self.stage]
        values = torch.cat([weight.data.flatten() for weight in self.weights])
        return {
            **KEPT,
            "loss_scaler": self.loss_scaler,
            "clip_grad": 1.0,
            "zero_stage": self.stage,
            "param_slice_mappings": [{}],
            masters: [values],
            states: {
                "state": {
                    number: {"exp_avg": torch.zeros(sum(piece.length for piece in row))}
                    for number, row in enumerate(rows)
                },
                "param_groups": [{"lr": 0.1, "params": [0]}],
            },
        }

    def load_state_dict(self, parts: Any, **options: bool) -> None:
        """Notes it."""
        self.asked.append((parts, options))

    def checkpoint_event_prologue(self) -> None:
        """Notes it."""
        self.asked.append("prologue")

    def checkpoint_event_epilogue(self) -> None:
        """Notes it."""
        self.asked.append("epilogue")

    def update_lp_params(self) -> None:
        """Notes it."""
        self.asked.append("weights from masters")


@pytest.fixture
def make(tiny_base: str, tmp_path: Path) -> Callable[[int], Any]:
    """Returns what builds a trainer that takes itself for one under DeepSpeed."""

    def made(stage: int) -> Any:
        given = tiny.recipe(tiny_base, training={"method": "dpo"}, evaluation={"samples": 0})
        trainer = tiny.trainer(given, tiny.tokens(given, tiny.PAIRS), tmp_path / "out", None, Zero)
        trainer.create_optimizer_and_scheduler(3)
        trainer.is_deepspeed_enabled = True
        trainer.optimizer = Engine(stage, list(trainer.model.parameters())[:2])
        trainer.deepspeed = SimpleNamespace(optimizer=trainer.optimizer)
        return trainer

    return made


@pytest.mark.parametrize("stage", [2, 3])
def test_what_follows_from_the_recipe_is_not_kept(stage: int, make: Callable[[int], Any]) -> None:
    trainer = make(stage)
    assert set(trainer.optimizer_state()) == {*KEPT, *NAMES[stage]}
    assert NAMES[stage] == (MASTERS[stage], OPTIMIZER_STATES[stage])


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_those_of_its_rows(stage: int, make: Callable[[int], Any]) -> None:
    trainer = make(stage)
    assert trainer.trained() == [trainer.optimizer.weights]


def test_each_process_of_a_machine_writes_its_part(make: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(2)
    names = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 6, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 2}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    assert trainer.num_parts() == 3


def saved(trainer: Any, folder: Path) -> dict[str, Any]:
    """Saves the optimizer and the schedule, and returns what was kept."""
    trainer._save_optimizer_and_scheduler(str(folder))
    kept: dict[str, Any] = files.read(str(folder / "optimizer_0.zero"))
    return kept


def test_its_part_is_saved_beside_the_schedule(
    make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(2)
    trainer.lr_scheduler.last_epoch = 3
    assert tree_digest(saved(trainer, tmp_path)) == tree_digest(trainer.optimizer_state())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["optimizer_0.zero", "scheduler.pt"]
    assert torch.load(tmp_path / "scheduler.pt", weights_only=True)["last_epoch"] == 3
    (tmp_path / "scheduler.pt").unlink()
    monkeypatch.setattr(type(trainer.args), "should_save", property(lambda _: False))
    saved(trainer, tmp_path)
    assert not (tmp_path / "scheduler.pt").exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_its_part_is_restored_with_the_weights_made_anew(
    stage: int, make: Callable[[int], Any], tmp_path: Path
) -> None:
    trainer = make(stage)
    kept = saved(trainer, tmp_path)
    trainer._load_part(str(tmp_path))
    loads = {"load_optimizer_states": True, "load_from_fp32_weights": True}
    if stage == 3:
        first, (parts, options), last = trainer.optimizer.asked
        assert (first, last) == ("prologue", "epilogue")
    else:
        (parts, options), last = trainer.optimizer.asked
        assert last == "weights from masters"
    assert options == loads
    (part,) = parts
    assert part.pop("loss_scaler") == "its scaler"
    assert tree_digest(part) == tree_digest(kept)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_another_number_of_processes_has_saved_is_cut_anew(
    stage: int, make: Callable[[int], Any], tmp_path: Path
) -> None:
    trainer = make(stage)
    own, weights = trainer.optimizer_state(), trainer.optimizer.weights
    cut = Partitioning(stage, weight_sizes([weights]), 2)
    values = [weight.data.flatten() for weight in weights]
    for rank, rows in enumerate(cut.rows):

        def row(pieces: Any, *, lean: bool) -> torch.Tensor:
            real = [values[piece.weight][piece.start : piece.stop] for piece in pieces]
            padding = [torch.zeros(0 if lean else piece.padding) for piece in pieces]
            return torch.cat([each for pair in zip(real, padding, strict=True) for each in pair])

        entries = {number: {"exp_avg": row(pieces, lean=False)} for number, pieces in enumerate(rows)}
        part = {
            **own,
            MASTERS[stage]: [row(pieces, lean=stage == 2) for pieces in rows],
            OPTIMIZER_STATES[stage]: {"state": entries, "param_groups": [{"lr": 0.5, "params": [0]}]},
        }
        files.write(str(tmp_path / files.file_name(rank)), part)
    trainer.resumption = Resumption(folder=str(tmp_path), ranks=2, strategy=f"zero{stage}", is_reshaped=True)
    trainer._load_part(str(tmp_path))
    ((part,), _) = next(each for each in trainer.optimizer.asked if isinstance(each, tuple))
    everything = torch.cat(values)
    assert torch.equal(part[MASTERS[stage]][0][: len(everything)], everything)
    assert torch.equal(part[OPTIMIZER_STATES[stage]]["state"][0]["exp_avg"][: len(everything)], everything)
    assert part[OPTIMIZER_STATES[stage]]["param_groups"] == [{"lr": 0.5, "params": [0]}]


def test_deepspeed_never_sees_the_checkpoint(
    make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would unpickle files that come from a bucket."""
    trainer = make(3)
    saved(trainer, tmp_path)
    begin(trainer, Resumption(folder=str(tmp_path)))
    given: list[Any] = []
    upstream = next(each for each in type(trainer).__mro__ if each.__module__ == "transformers.trainer")
    monkeypatch.setattr(upstream, "_prepare_for_training", lambda self, *given_: given.append(given_) or "prepared")
    monkeypatch.setattr(upstream, "_load_optimizer_and_scheduler", lambda self, folder: given.append(folder))
    monkeypatch.setattr(upstream, "_load_scaler", lambda self, folder: given.append("scaler"))
    assert trainer._prepare_for_training(3, "loader", None) == "prepared"
    assert (given, trainer.optimizer.asked) == ([(3, "loader", None)], [])
    given.clear()
    assert trainer._prepare_for_training(3, "loader", str(tmp_path)) == "prepared"
    loads = [each for each in trainer.optimizer.asked if isinstance(each, tuple)]
    assert [options["load_optimizer_states"] for _, options in loads] == [True]
    assert given == [(3, "loader", None), str(tmp_path), "scaler"], "the schedule is restored all the same"
    trainer.optimizer.asked.clear()
    trainer._load_optimizer_and_scheduler(None)
    assert trainer.optimizer.asked == [], "at a run's start there is nothing to restore"


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_weights_are_written_by_one(
    stage: int, make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(stage)
    given: list[Any] = []
    upstream = next(each for each in type(trainer).__mro__ if each.__module__ == "transformers.trainer")
    monkeypatch.setattr(upstream, "save_model", lambda self, *asked: given.append(asked))
    trainer.save_model(str(tmp_path / "model"), _internal_call=True)
    if stage == 3:
        assert given == [(str(tmp_path / "model"), True)]
    else:
        assert given == []
        names = os.listdir(tmp_path / "model")
        assert "model.safetensors" in names
        assert "training_args.bin" not in names
