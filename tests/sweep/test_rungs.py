"""Rungs of a sweep: who is compared with whom, behind which chunk, and how many go on."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.sweep.search import brackets, check_trials, rungs


def _recipe(chunks: int = 16, spare: int = 0, **sweep: Any) -> Recipe:
    document = {
        "name": "swept",
        "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": "rows.jsonl"},
        "training": {"max_steps": 128, "batch_size": 8},
        "chunks": {"count": chunks, "spare": spare},
        "sweep": {"parameters": {"training.learning_rate": {"min": 1e-5, "max": 1e-3, "log": True}}, **sweep},
    }
    return load.validate(document, origin="test")


@pytest.mark.parametrize(
    ("trials", "chunks", "eta", "first", "expected"),
    [
        pytest.param(8, 16, 4, 1, [(1, 2), (4, 1), (16, 1)], id="a-quarter-goes-on"),
        pytest.param(8, 16, 2, 1, [(1, 4), (2, 2), (4, 1), (16, 1)], id="half-goes-on"),
        pytest.param(8, 16, 3, 1, [(1, 2), (3, 1), (16, 1)], id="what-does-not-divide-is-rounded-down"),
        pytest.param(8, 16, None, 1, [(16, 1)], id="all-to-the-end"),
        pytest.param(100, 4, 2, 1, [(1, 50), (2, 25), (4, 1)], id="more-trials-than-rungs"),
        pytest.param(2, 3, 3, 1, [(1, 1), (3, 1)], id="one-goes-on-at-least"),
        pytest.param(1, 9, 3, 1, [(9, 1)], id="one-trial-has-nobody-to-beat"),
        pytest.param(9, 9, 3, 3, [(3, 3), (9, 1)], id="a-later-first-rung"),
        pytest.param(5, 1, 2, 1, [(1, 1)], id="one-chunk"),
        pytest.param(1000, 81, 3, 1, [(1, 333), (3, 111), (9, 37), (27, 12), (81, 1)], id="a-thousand"),
    ],
)
def test_rungs(trials: int, chunks: int, eta: int | None, first: int, expected: list[tuple[int, int]]) -> None:
    assert rungs(trials, chunks, eta, first) == expected


def _planned(recipe: Recipe) -> list[tuple[int, list[tuple[int, int, int, int]]]]:
    return [
        (found.trials, [(rung.number, rung.first, rung.chunk, rung.keep) for rung in found.rungs])
        for found in brackets(recipe)
    ]


def test_halving_is_one_bracket_whose_rungs_follow_on_each_other() -> None:
    assert _planned(_recipe(trials=8, halving={"eta": 4})) == [(8, [(1, 1, 1, 2), (2, 2, 4, 1), (3, 5, 16, 1)])]


def test_hyperband_goes_from_many_short_ones_to_few_long_ones() -> None:
    # s_max = 2; n = ceil(3 / (s + 1) * 4^s) = 16, 6, 3; r = 16 / 4^s = 1, 4, 16
    assert _planned(_recipe(hyperband={"eta": 4})) == [
        (16, [(1, 1, 1, 4), (2, 2, 4, 1), (3, 5, 16, 1)]),
        (6, [(4, 1, 4, 1), (5, 5, 16, 1)]),
        (3, [(6, 1, 16, 1)]),
    ]


def test_the_brackets_of_hyperband_share_the_trials_that_are_given() -> None:
    assert [trials for trials, _ in _planned(_recipe(hyperband={"eta": 4}, trials=20))] == [13, 5, 2]


def test_optuna_gets_three_batches_of_trials_to_learn_from() -> None:
    assert [trials for trials, _ in _planned(_recipe(method="optuna", trials=10))] == [4, 3, 3]


def test_a_grid_has_as_many_trials_as_combinations() -> None:
    parameters = {"training.learning_rate": [1e-4, 1e-3], "training.batch_size": [4, 8, 16]}
    assert [trials for trials, _ in _planned(_recipe(method="grid", parameters=parameters))] == [6]


def test_more_trials_than_a_loop_takes_are_refused() -> None:
    with pytest.raises(UserError, match="1001 trials, at most 1000"):
        brackets(_recipe(method="grid", parameters={"seed": list(range(1001))}))


def test_each_trial_is_checked_before_anything_starts() -> None:
    assert check_trials(_recipe(trials=8)) == 8
    wrong = _recipe(parameters={"training.learning_rat": [1e-4]})
    with pytest.raises(UserError, match=r"training.learning_rat: unknown key; did you mean 'learning_rate'\?"):
        check_trials(wrong)
    beyond = _recipe(trials=2, parameters={"training.warmup_steps": {"min": -5, "max": 10000}})
    with pytest.raises(UserError, match=r"training\.warmup_steps"):  # whichever two are drawn
        check_trials(beyond)
