"""Orders of rows: functions of seed, epoch and step alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl.trainer.utils import RepeatSampler

from baton.recipe.training import Curriculum
from baton.train import samplers as ordering
from baton.train.generation import SeekingRepeatSampler
from baton.train.samplers import EasyFirst, GroupedByLength
from tests.support import tiny

RAMPS = {
    "linear at the start": ({"ramp": "linear", "start": 0.2, "until": 0.5}, 0.0, 0.2),
    "linear halfway": ({"ramp": "linear", "start": 0.2, "until": 0.5}, 0.25, 0.6),
    "linear at its end": ({"ramp": "linear", "start": 0.2, "until": 0.5}, 0.5, 1.0),
    "linear behind its end": ({"ramp": "linear", "start": 0.2, "until": 0.5}, 0.9, 1.0),
    "exponential at the start": ({"ramp": "exponential", "start": 0.25, "until": 1.0}, 0.0, 0.25),
    "exponential halfway": ({"ramp": "exponential", "start": 0.25, "until": 1.0}, 0.5, 0.5),
    "exponential at three quarters": ({"ramp": "exponential", "start": 0.0625, "until": 1.0}, 0.75, 0.5),
    "exponential at its end": ({"ramp": "exponential", "start": 0.25, "until": 1.0}, 1.0, 1.0),
    "steps before the first jump": ({"ramp": "step", "start": 0.2, "until": 0.5, "levels": 4}, 0.12, 0.2),
    "steps at the first jump": ({"ramp": "step", "start": 0.2, "until": 0.5, "levels": 4}, 0.125, 0.4),
    "steps at the second jump": ({"ramp": "step", "start": 0.2, "until": 0.5, "levels": 4}, 0.25, 0.6),
    "steps before the last jump": ({"ramp": "step", "start": 0.2, "until": 0.5, "levels": 4}, 0.49, 0.8),
    "steps at their end": ({"ramp": "step", "start": 0.2, "until": 0.5, "levels": 4}, 0.5, 1.0),
}


@pytest.mark.parametrize(("settings", "progress", "expected"), RAMPS.values(), ids=RAMPS)
def test_the_share_that_may_be_drawn(settings: dict[str, Any], progress: float, expected: float) -> None:
    assert ordering.share(Curriculum(**settings), progress) == pytest.approx(expected, rel=1e-12)


def easy_first(difficulty: list[float], seed: int = 7, **changes: Any) -> EasyFirst:
    """A sampler of two rows a step, over ten steps, that may draw every row from the fifth on."""
    settings = {"batch_size": 2, "num_steps": 10, "curriculum": Curriculum(start=0.2, until=0.5), **changes}
    return EasyFirst(difficulty, settings.pop("curriculum"), seed=seed, **settings)


def test_steps_draw_from_the_easiest_rows() -> None:
    """Ten rows, the last the easiest: the pool is 2, 3.6, 5.2, 6.8 and 8.4 rows, rounded up, then all."""
    sampler = easy_first([float(-n) for n in range(10)])
    pools = [{9, 8}, {9, 8, 7, 6}, set(range(9, 3, -1)), set(range(9, 2, -1)), set(range(9, 0, -1))]
    drawn: list[list[list[int]]] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = list(sampler)
        drawn.append([order[at : at + 2] for at in range(0, 10, 2)])
    for step, pool in zip(drawn[0], pools, strict=True):
        assert len(set(step)) == 2
        assert set(step) <= pool
    assert set(itertools.chain(*drawn[1])) - pools[3], "hard rows come, once they may"


@given(
    difficulty=st.lists(st.integers(0, 5).map(float), min_size=1, max_size=30),
    batch_size=st.integers(1, 9),
    num_steps=st.integers(1, 20),
    start=st.floats(0.01, 1),
    until=st.floats(0.01, 1),
    ramp=st.sampled_from(["linear", "exponential", "step"]),
    epoch=st.integers(0, 3),
)
def test_no_step_draws_a_row_beyond_its_pool_or_twice(
    difficulty: list[float], batch_size: int, num_steps: int, start: float, until: float, ramp: Any, epoch: int
) -> None:
    curriculum = Curriculum(start=start, until=until, ramp=ramp)
    sampler = easy_first(difficulty, batch_size=batch_size, num_steps=num_steps, curriculum=curriculum)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert len(order) == len(sampler) == len(difficulty)
    by_ease = sorted(difficulty)
    steps = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    for index, step in enumerate(steps, epoch * len(steps)):
        size = max(len(step), math.ceil(ordering.share(curriculum, index / num_steps) * len(difficulty)))
        assert len(set(step)) == len(step)
        assert max(difficulty[row] for row in step) <= by_ease[min(size, len(difficulty)) - 1]


SAMPLERS = {
    "easy first": lambda seed: easy_first([float(n) for n in range(20)], seed, curriculum=Curriculum(start=1.0)),
    "grouped": lambda seed: GroupedByLength([n % 7 for n in range(20)], 2, seed),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_an_order_is_the_same_wherever_it_is_made(make: Any) -> None:
    def order(seed: int, epoch: int, before: tuple[int, ...] = ()) -> list[int]:
        sampler = make(seed)
        for passed in before:
            sampler.set_epoch(passed)
            assert len(list(sampler)) == 20
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(7, 2, before=(0, 1)) == order(7, 2)
    different = {tuple(order(seed, epoch)) for seed in (7, 8) for epoch in (0, 1, 2)}
    assert len(different) == 6


def test_the_orders_are_those_of_all_releases() -> None:
    """Runs resume with a newer release."""
    easy = easy_first([float(n) for n in range(7)])
    assert list(easy) == [1, 0, 1, 2, 3, 2, 2]
    easy.set_epoch(1)
    assert list(easy) == [1, 4, 6, 0, 0, 6, 6]
    lengths = [n % 7 for n in range(20)]
    grouped = GroupedByLength(lengths, 2, 7)
    grouped.set_epoch(2)
    generator = torch.Generator().manual_seed(7423388659917013488)  # of seed 7 and epoch 2
    assert list(grouped) == list(get_length_grouped_indices(lengths, 2, generator=generator))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=200), batch_size=st.integers(1, 16))
def test_grouping_by_length_loses_and_doubles_no_row(lengths: list[int], batch_size: int) -> None:
    sampler = GroupedByLength(lengths, batch_size, 7)
    order = list(sampler)
    assert sorted(order) == list(range(len(lengths)))
    assert len(sampler) == len(order)
    assert lengths[order[0]] == max(lengths), "the longest row comes first, so that memory runs out at once"


def test_grouping_by_length_leaves_less_to_pad() -> None:
    lengths = [(n * 37) % 64 + 1 for n in range(256)]

    def padding(order: list[int]) -> int:
        batches = [[lengths[row] for row in order[at : at + 8]] for at in range(0, 256, 8)]
        return sum(len(batch) * max(batch) - sum(batch) for batch in batches)

    assert padding(list(GroupedByLength(lengths, 8, 7))) < padding(list(range(256))) / 3


ROWS = datasets.Dataset.from_dict(
    {"prompt_ids": [[1], [1, 2, 3], [1, 2]], "chosen_ids": [[5], [5], [5] * 9], "level": ["3", "1.5", "2"]}
)


def test_length_counts_all_that_a_row_holds() -> None:
    assert ordering.lengths(ROWS) == [2, 4, 11]


@pytest.mark.parametrize(
    ("training", "kind", "easiest"),
    [
        ({}, None, None),
        ({"group_by_length": True}, GroupedByLength, None),
        ({"curriculum": {}}, EasyFirst, [0, 1, 2]),
        ({"curriculum": {"by": "level"}}, EasyFirst, [1, 2, 0]),
    ],
    ids=["the trainer's own", "grouped", "by length", "by column"],
)
def test_the_recipe_chooses(training: dict[str, Any], kind: Any, easiest: list[int] | None) -> None:
    recipe = tiny.recipe("org/model", training=training, data={"extra_columns": ["level"]})
    sampler = ordering.sampler(recipe, ROWS, 10)
    assert type(sampler) is (kind or type(None))
    assert getattr(sampler, "order", None) == easiest


@given(rows=st.integers(1, 30), epochs=st.integers(1, 4), batch_size=st.integers(1, 4), repeats=st.integers(1, 3))
def test_a_seeking_sampler_has_upstreams_order_in_every_epoch(
    rows: int, epochs: int, batch_size: int, repeats: int
) -> None:
    settings = {"mini_repeat_count": 2, "batch_size": batch_size, "repeat_count": repeats, "seed": 7}
    upstream = RepeatSampler(range(rows), **settings)
    in_turn = [list(upstream) for _ in range(epochs)]
    for epoch in reversed(range(epochs)):
        seeking = SeekingRepeatSampler(range(rows), **settings)
        seeking.set_epoch(epoch)
        assert list(seeking) == in_turn[epoch]
