"""Passes of virtual workers: what each counts, what each comes to, and what it draws."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baton.errors import UserError
from baton.train import virtual, weighing
from baton.train.protocol import ChunkTrainer
from baton.train.samplers import DistributedBatches
from baton.train.virtual import MicroBatches, VirtualWorkers
from baton.train.weighing import COUNTER

WORKERS = 4


def of_rows(rest: int, micro: int, own: range, *, sums: bool = False) -> tuple[MicroBatches, list[list[int]]]:
    """The passes of a last step with so many rows, and the rows of each."""
    pieces = DistributedBatches(range(8 + rest), batch_size=8, micro=micro, world_size=WORKERS)
    batches = list(pieces)[8 // micro :]
    made = MicroBatches.of_rows(own, len(batches) // WORKERS, pieces, 1, sums=sums)
    return made, [batch for worker in own for batch in batches[worker::WORKERS]]


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("rest", range(1, 8))
def test_of_means_each_row_counts_as_much_whoever_makes_its_pass(rest: int, micro: int) -> None:
    whole, _ = of_rows(rest, micro, range(WORKERS))
    for processes in (1, 2, 4):
        counted = dict.fromkeys(range(8, 8 + rest), 0.0)
        for own in (range(at, at + WORKERS // processes) for at in range(0, WORKERS, WORKERS // processes)):
            made, batches = of_rows(rest, micro, own)
            assert (made.total, made.fillers) == (whole.total, whole.fillers)
            for position, batch in enumerate(batches):
                worker, number = made.at(position)
                assert made.shares[worker] == whole.shares[worker]
                if worker not in made.fillers:  # a mean over its rows, and over the passes that are made
                    for row in batch:
                        counted[row] += made.shares[worker][number] / len(batch) / made.total
        assert counted == pytest.approx(dict.fromkeys(counted, 1 / rest))


@pytest.mark.parametrize(("rest", "fillers"), [(1, {1, 2, 3}), (3, {3}), (4, set()), (5, set())])
def test_workers_that_no_row_is_left_for_make_no_pass(rest: int, fillers: set[int]) -> None:
    made, _ = of_rows(rest, 1, range(2, 4), sums=True)
    assert made.fillers == fillers
    assert made.total == (WORKERS - len(fillers)) * made.rounds
    assert made.shares == {}, "a sum counts itself"


def test_a_process_makes_the_passes_of_one_worker_after_the_other() -> None:
    made = MicroBatches.of(range(2, 4), 3, WORKERS)
    assert len(made) == 6
    assert made.total == 12
    assert [made.at(position) for position in range(6)] == [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]


def trainer() -> Any:
    """One that has logged and counted something."""
    made: Any = ChunkTrainer()
    made._metrics = {"train": defaultdict(list, loss=[1.0], num_tokens=[30]), "eval": defaultdict(list)}
    setattr(made, COUNTER, 30)
    return made


def passing(of: Any, tokens: int, loss: float) -> Any:
    """A pass of TRL's, which counts, logs a total, and reads what it has logged itself."""

    def compute() -> str:
        setattr(of, COUNTER, getattr(of, COUNTER) + tokens)
        of._metrics["train"]["num_tokens"] = [getattr(of, COUNTER)]
        of._metrics["train"]["loss"].append(loss)
        assert of._metrics["train"]["loss"] == [loss]
        return "outputs"

    return compute


def test_what_a_pass_has_come_to_is_apart_until_it_is_added() -> None:
    ours, theirs = trainer(), trainer()
    made = [weighing.record_micro_batch(ours, "train", passing(ours, *of)) for of in ((5, 2.0), (7, 3.0))]
    assert [record.tokens for record in made] == [5, 7]
    assert [record.outputs for record in made] == ["outputs"] * 2
    assert (ours._metrics, getattr(ours, COUNTER)) == (theirs._metrics, 30)
    for record in made:
        weighing.add_micro_batch(ours, "train", record)
    assert ours._metrics["train"] == {"loss": [1.0, 2.0, 3.0], "num_tokens": [42]}, "a total is no value of each pass"
    assert getattr(ours, COUNTER) == 42


def test_a_pass_that_fails_leaves_the_log_as_it_was() -> None:
    ours = trainer()

    def failing() -> None:
        passing(ours, 5, 2.0)()
        raise MemoryError

    with pytest.raises(MemoryError):
        weighing.record_micro_batch(ours, "train", failing)
    assert (ours._metrics, getattr(ours, COUNTER)) == (trainer()._metrics, 30)


def drawn(seed: int, step: int, place: str) -> tuple[float, float, float]:
    made: Any = VirtualWorkers()
    made.args, made.state = SimpleNamespace(seed=seed), SimpleNamespace(global_step=step)
    made.seed(place)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_what_is_drawn_follows_from_the_seed_the_step_and_the_pass() -> None:
    once = drawn(7, 3, "2:1")
    assert drawn(7, 3, "2:1") == once
    others = [drawn(8, 3, "2:1"), drawn(7, 4, "2:1"), drawn(7, 3, "1:2"), drawn(7, 3, "21:1"), drawn(7, 3, "end")]
    for values in zip(once, *others, strict=True):
        assert len(set(values)) == len(values), "of each generator"


def test_layers_that_keep_statistics_of_their_batches_are_refused() -> None:
    virtual._require_no_batch_statistics(nn.Sequential(nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False)))
    with pytest.raises(UserError, match=r"layer 1\.0 keeps statistics of the batches it sees, and each process sees"):
        virtual._require_no_batch_statistics(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))))
