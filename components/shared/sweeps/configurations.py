"""The values in which the trials of a sweep differ: all combinations, drawn, or proposed by Optuna."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, Search, extras, recipe_file
from baton.components.shared.recipe.sweep import Range

Values = dict[str, Any]
"""Dotted path → value."""
Parameters = Mapping[str, "list[Any] | Range"]

TRIES = 100
"""Draws in a row that give nothing new after which a random search takes a configuration twice."""
STARTUP = 10
"""Trials known before TPE models them; until then it draws."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A trial of an earlier bracket: its values and scores.

    Attributes:
        values: Its values.
        scores: Chunk → value after it; one that is not a number is left out.
        finished: Whether it trained to the end.
    """

    values: Values
    scores: dict[int, float] = field(default_factory=dict)
    finished: bool = False


def draw(search: Search, seed: int, count: int, known: Sequence[Known] = ()) -> list[Values]:
    """Returns the values of the next trials, the same for the same arguments.

    Args:
        search: What they are chosen from.
        seed: The recipe's.
        count: How many; of a grid always all.
        known: The trials before them.

    Raises:
        UserError: Optuna is not installed.
    """
    if search.method == "grid":
        return grid(search.parameters)
    if search.method == "optuna":
        return _proposed(search, seed, count, known)
    before = [trial.values for trial in known]
    return _drawn(search.parameters, random.Random(f"{seed}/{len(before)}"), count, before)


def grid(parameters: Parameters) -> list[Values]:
    """Returns every combination, the last parameter changing first."""
    choices = [values if isinstance(values, list) else values.stepped() or [] for values in parameters.values()]
    return [dict(zip(parameters, combination, strict=True)) for combination in product(*choices)]


def ends(parameters: Parameters) -> list[Values]:
    """Returns configurations that try each value of a list and both ends of a range once, for a check of all."""
    tried: dict[str, list[Any]] = {
        path: values if isinstance(values, list) else [values.min, values.max] for path, values in parameters.items()
    }
    longest = max(len(values) for values in tried.values())
    return [{path: values[min(at, len(values) - 1)] for path, values in tried.items()} for at in range(longest)]


def configured(recipe: Recipe, values: Values, name: str) -> Recipe:
    """Returns the ordinary recipe of a trial: without a sweep, its values in their places.

    Args:
        recipe: The recipe with the sweep.
        values: The trial's own.
        name: How it is called in messages.

    Raises:
        UserError: the values make no recipe; see `recipe_file.validate`.
    """
    document = recipe.model_dump(mode="json")
    document["sweep"] = None
    for path, value in values.items():
        try:
            recipe_file.place(document, path, value)
        except KeyError as error:
            raise UserError(
                f"sweep.parameters.{path}: {error.args[0]!r} is a value, it has no keys below it."
            ) from None
    # What was given by the recipe and is the other way to say how long to train gives way.
    if values.get("training.max_steps") is not None and "training.epochs" not in values:
        document["training"]["epochs"] = None
    if values.get("training.epochs") is not None and "training.max_steps" not in values:
        document["training"]["max_steps"] = None
    return recipe_file.validate(document, origin=f"{name}: {words(values)}")


def words(values: Values) -> str:
    """Returns values for people: `training.learning_rate=0.0001, training.batch_size=8`."""
    return ", ".join(f"{path}={json.dumps(value)}" for path, value in values.items())


def _drawn(parameters: Parameters, source: random.Random, count: int, before: list[Values]) -> list[Values]:
    seen = {json.dumps(values, sort_keys=True) for values in before}
    drawn: list[Values] = []
    while len(drawn) < count:
        for _ in range(TRIES):
            values = {path: _one(choices, source) for path, choices in parameters.items()}
            if json.dumps(values, sort_keys=True) not in seen:
                break
        seen.add(json.dumps(values, sort_keys=True))
        drawn.append(values)
    return drawn


def _one(choices: list[Any] | Range, source: random.Random) -> Any:
    if isinstance(choices, list):
        return source.choice(choices)
    if (stepped := choices.stepped()) is not None:
        return source.choice(stepped)
    if choices.log:
        value = math.exp(source.uniform(math.log(choices.min), math.log(choices.max)))
    else:
        value = source.uniform(choices.min, choices.max)
    return round(value) if choices.whole else float(f"{value:.6g}")


def _proposed(search: Search, seed: int, count: int, known: Sequence[Known]) -> list[Values]:
    """Asks TPE for trials in one batch, having told it of those before.

    A trial that was stopped is told as pruned, with its score after each chunk: TPE ranks the pruned below the
    finished, those that came further and scored better first. One without any score is not told.
    """
    optuna = _optuna()
    distributions = {path: _distribution(choices) for path, choices in search.parameters.items()}
    sampler = optuna.samplers.TPESampler(
        seed=(seed + len(known)) % 2**32, n_startup_trials=min(STARTUP, count), constant_liar=True
    )
    study = optuna.create_study(sampler=sampler, direction="minimize" if search.mode == "min" else "maximize")
    for trial in known:
        if trial.scores:
            study.add_trial(_told(search, trial, distributions))
    asked = [study.ask(distributions) for _ in range(count)]
    return [
        {path: _value(choices, trial.params[path]) for path, choices in search.parameters.items()} for trial in asked
    ]


def _told(search: Search, trial: Known, distributions: dict[str, Any]) -> Any:
    """Returns a trial as Optuna's `FrozenTrial`."""
    optuna = _optuna()
    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        params={
            path: choices.index(trial.values[path]) if isinstance(choices, list) else trial.values[path]
            for path, choices in search.parameters.items()
        },
        distributions=distributions,
        intermediate_values=trial.scores,
        state=states.COMPLETE if trial.finished else states.PRUNED,
        value=trial.scores[max(trial.scores)],
    )


def _distribution(choices: list[Any] | Range) -> Any:
    """Returns Optuna's form of a parameter; of a list, the position in it, whatever its values are."""
    kinds = _optuna().distributions
    if isinstance(choices, list):
        return kinds.CategoricalDistribution(range(len(choices)))
    if choices.whole:
        return kinds.IntDistribution(choices.min, choices.max, log=choices.log, step=choices.step or 1)
    return kinds.FloatDistribution(choices.min, choices.max, log=choices.log, step=choices.step)


def _value(choices: list[Any] | Range, proposed: Any) -> Any:
    return choices[proposed] if isinstance(choices, list) else proposed


def _optuna() -> Any:
    extras.require("sweep.method: optuna", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
