"""The values of a sweep's trials: all combinations, drawn, or proposed, and the recipes that they make."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.search import Search
from baton.sweep import search as configurations
from baton.sweep.search import Known

RATE = "training.learning_rate"


def _recipe(**sections: Any) -> Recipe:
    document = {
        "name": "swept",
        "model": {"from_scratch": {"architecture": "llama"}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": "rows.jsonl"},
        "training": {"epochs": 2, "batch_size": 8},
        "chunks": {"count": 4},
        "sweep": {"parameters": {RATE: [1e-4, 1e-3]}},
    }
    return load.validate({**document, **sections}, origin="test")


def _search(**given: Any) -> Search:
    return Search.model_validate(given)


def test_a_grid_is_every_combination_and_the_last_parameter_changes_first() -> None:
    found = configurations.grid(_search(parameters={RATE: [1, 2], "seed": {"min": 3, "max": 7, "step": 2}}).parameters)
    assert found == [
        {RATE: 1, "seed": 3}, {RATE: 1, "seed": 5}, {RATE: 1, "seed": 7},
        {RATE: 2, "seed": 3}, {RATE: 2, "seed": 5}, {RATE: 2, "seed": 7},
    ]  # fmt: skip


def test_drawing_depends_on_the_seed_alone() -> None:
    search = _search(parameters={RATE: {"min": 1e-5, "max": 1e-3, "log": True}, "training.batch_size": [8, 16, 32]})
    first = configurations.draw(search, 7, 20)
    assert first == configurations.draw(search, 7, 20)
    assert first != configurations.draw(search, 8, 20)
    rates = [values[RATE] for values in first]
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    assert 5 <= sum(rate < 1e-4 for rate in rates) <= 15  # about half of them, on a logarithmic scale
    assert {values["training.batch_size"] for values in first} == {8, 16, 32}


def test_no_configuration_is_drawn_twice_as_long_as_there_are_others() -> None:
    search = _search(parameters={"training.batch_size": [8, 16], "seed": [0, 1]})
    before = configurations.draw(search, 0, 3)
    last = configurations.draw(search, 0, 1, [Known(values=values) for values in before])
    assert len({tuple(values.values()) for values in [*before, *last]}) == 4
    assert len(configurations.draw(search, 0, 6)) == 6


def test_ranges_give_whole_numbers_and_steps_where_they_are_written_so() -> None:
    search = _search(
        parameters={
            "training.warmup_steps": {"min": 0, "max": 3},
            "training.weight_decay": {"min": 0.0, "max": 0.3, "step": 0.1},
        }
    )
    found = configurations.draw(search, 1, 16)
    assert {values["training.warmup_steps"] for values in found} == {0, 1, 2, 3}
    assert {round(values["training.weight_decay"], 9) for values in found} == {0.0, 0.1, 0.2, 0.3}


def test_a_trial_is_an_ordinary_recipe_with_its_values() -> None:
    found = configurations.configured(_recipe(), {RATE: 5e-4, "training.max_steps": 12, "seed": 3}, "trial t000")
    assert (found.training.learning_rate, found.training.max_steps, found.seed) == (5e-4, 12, 3)
    assert found.training.epochs is None  # it would say another length
    assert found.sweep is None
    assert found.name == "swept"


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        pytest.param({"parameters": {"trainin.epochs": [1]}}, "did you mean 'training'", id="typing-error"),
        pytest.param({"parameters": {"store.uri": ["a"]}}, "store.uri: is the same for all trials", id="not-swept"),
        pytest.param({"parameters": {"chunks.count": [4]}}, "chunks.count: is the same for all", id="chunks"),
        pytest.param({"parameters": {}}, "at least 1 item", id="nothing"),
        pytest.param({"parameters": {RATE: []}}, "no values to choose from", id="no-values"),
        pytest.param({"parameters": {RATE: {"min": 1e-3, "max": 1e-4}}}, "is not above min", id="range-upside-down"),
        pytest.param({"parameters": {RATE: {"min": 0.0, "max": 1e-4, "log": True}}}, "no logarithm", id="log-of-0"),
        pytest.param(
            {"method": "grid", "parameters": {RATE: {"min": 0.1, "max": 0.2}}}, "values or a step", id="grid-of-range"
        ),
        pytest.param({"halving": {"eta": 3}, "hyperband": {"eta": 3}}, "remove one", id="two-rules"),
        pytest.param({"hyperband": {"eta": 3}, "brackets": 2}, "makes its own", id="brackets-of-hyperband"),
        pytest.param({"halving": {"eta": 5}}, "set chunks.count to eta, 5, or more", id="too-few-chunks"),
        pytest.param({"metrik": "eval_loss"}, "did you mean 'metric'", id="unknown-key"),
    ],
)
def test_what_a_sweep_cannot_be_is_said(sweep: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _recipe(sweep={"parameters": {RATE: [1e-4, 1e-3]}, **sweep})


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        pytest.param("training.learning_rat", 1, r"unknown key; did you mean 'learning_rate'\?", id="unknown"),
        pytest.param("training.learning_rate.peak", 1, "'learning_rate' is a value", id="below-a-value"),
        pytest.param("training.batch_size", 0, "training.batch_size: Input should be greater than 0", id="value"),
    ],
)
def test_a_value_that_makes_no_recipe_is_named(path: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        configurations.configured(_recipe(), {path: value}, "trial t001")


def test_optuna_draws_by_what_it_was_told() -> None:
    pytest.importorskip("optuna")
    search = _search(method="optuna", parameters={RATE: {"min": 1e-5, "max": 1e-1, "log": True}, "seed": ["a", [1, 2]]})
    drawn = configurations.draw(search, 0, 12)
    assert drawn == configurations.draw(search, 0, 12)
    # Less is better, and the loss grows with the distance from 1e-2 in powers of ten; the worse half was pruned.
    import math

    losses = {index: abs(math.log10(values[RATE]) + 2) for index, values in enumerate(drawn)}
    best = sorted(losses, key=losses.__getitem__)[:6]
    known = [
        Known(values=values, scores={1: losses[index], 4: losses[index]}, finished=True)
        if index in best
        else Known(values=values, scores={1: losses[index]})
        for index, values in enumerate(drawn)
    ]
    proposed = configurations.draw(search, 0, 12, [*known, Known(values=drawn[0])])  # the last one failed
    distance = [abs(math.log10(values[RATE]) + 2) for values in proposed]
    assert sum(distance) / 12 < sum(losses.values()) / 12 / 2  # where it saw them fall, and not all over
    assert {str(values["seed"]) for values in drawn} == {"a", "[1, 2]"}
