"""Configurations of a sweep and its rungs: the values of trials, and the chunks after which they compare.

Pure functions: values are all combinations, drawn from a seed, or proposed by Optuna.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any

from baton.errors import UserError
from baton.recipe import extras, load
from baton.recipe.recipe import Recipe
from baton.recipe.search import MAX_TRIALS, Range, Search

Values = dict[str, Any]
"""Dotted path → value."""
Parameters = Mapping[str, "list[Any] | Range"]

TRIES = 100
"""Draws in a row that give nothing new after which a random search takes a configuration twice."""
STARTUP = 10
"""Trials known before TPE models them; until then it draws."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A trial of an earlier bracket; scores by chunk, without those that are no number."""

    values: Values
    scores: dict[int, float] = field(default_factory=dict)
    finished: bool = False


def draw(search: Search, seed: int, count: int, known: Sequence[Known] = ()) -> list[Values]:
    """Returns the values of the next trials, the same for the same arguments."""
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


def value_ends(parameters: Parameters) -> list[Values]:
    """Returns configurations that try each value of a list and both ends of a range once, for a check of all."""
    tried: dict[str, list[Any]] = {
        path: values if isinstance(values, list) else [values.min, values.max] for path, values in parameters.items()
    }
    longest = max(len(values) for values in tried.values())
    return [{path: values[min(at, len(values) - 1)] for path, values in tried.items()} for at in range(longest)]


def configured(recipe: Recipe, values: Values, name: str) -> Recipe:
    """Returns the ordinary recipe of a trial: without a sweep, its values in their places."""
    document = recipe.model_dump(mode="json")
    document["sweep"] = None
    for path, value in values.items():
        try:
            load.set_path(document, path, value)
        except KeyError as error:
            raise UserError(
                f"sweep.parameters.{path}: {error.args[0]!r} is a value, it has no keys below it."
            ) from None
    # What was given by the recipe and is the other way to say how long to train gives way.
    if values.get("training.max_steps") is not None and "training.epochs" not in values:
        document["training"]["epochs"] = None
    if values.get("training.epochs") is not None and "training.max_steps" not in values:
        document["training"]["max_steps"] = None
    return load.validate(document, origin=f"{name}: {describe_values(values)}")


def describe_values(values: Values) -> str:
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
    finished, those that came further and scored better first. One without any score is not told. A value of a list is
    told as its position, whatever it is.
    """
    extras.require_packages("sweep.method: optuna", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds: Any = optuna.distributions  # typed for whole numbers apart
    states = optuna.trial.TrialState

    def distribution(choices: list[Any] | Range) -> Any:
        if isinstance(choices, list):
            return kinds.CategoricalDistribution(range(len(choices)))
        if choices.whole:
            return kinds.IntDistribution(choices.min, choices.max, log=choices.log, step=choices.step or 1)
        return kinds.FloatDistribution(choices.min, choices.max, log=choices.log, step=choices.step)

    distributions = {path: distribution(choices) for path, choices in search.parameters.items()}
    sampler = optuna.samplers.TPESampler(
        seed=(seed + len(known)) % 2**32, n_startup_trials=min(STARTUP, count), constant_liar=True
    )
    study = optuna.create_study(sampler=sampler, direction="minimize" if search.mode == "min" else "maximize")
    for trial in known:
        if trial.scores:
            told = optuna.trial.create_trial(
                params={
                    path: choices.index(trial.values[path]) if isinstance(choices, list) else trial.values[path]
                    for path, choices in search.parameters.items()
                },
                distributions=distributions,
                intermediate_values=trial.scores,
                state=states.COMPLETE if trial.finished else states.PRUNED,
                value=trial.scores[max(trial.scores)],
            )
            study.add_trial(told)
    asked = [study.ask(distributions).params for _ in range(count)]
    return [
        {
            path: choices[own[path]] if isinstance(choices, list) else own[path]
            for path, choices in search.parameters.items()
        }
        for own in asked
    ]


DEFAULT_TRIALS = 8
OPTUNA_BRACKETS = 3


@dataclass(frozen=True, kw_only=True)
class PlannedRung:
    """One comparison, after a chunk, of the trials of a bracket; all numbers count from 1.

    At a bracket's last rung, which is after the last chunk, all but one are beaten. `first` is the first chunk that
    trials train for it.
    """

    number: int
    bracket: int
    chunk: int
    keep: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """So many trials that are compared with each other, from their first chunk on."""

    number: int
    trials: int
    rungs: tuple[PlannedRung, ...]


def rungs(trials: int, chunks: int, eta: int | None, first: int = 1) -> list[tuple[int, int]]:
    """Returns the chunks after which trials are compared, and how many advance from each; the last has one.

    One of `eta` advances, None compares at the end only. `first` is the chunk of the first comparison; each next one is
    after `eta` times as many.
    """
    pairs: list[tuple[int, int]] = []
    for level in count():
        chunk = first * (eta or 1) ** level
        left = trials // (eta or 1) ** level
        if eta is None or chunk >= chunks or left <= 1:
            return [*pairs, (chunks, 1)]
        pairs.append((chunk, max(left // eta, 1)))
    raise AssertionError  # count() has no end


def brackets(recipe: Recipe) -> list[Bracket]:
    """Returns the brackets of a recipe's sweep."""
    search, chunks = recipe.sweep, recipe.num_chunks
    assert search is not None
    drawn: list[Bracket] = []
    numbers = count(1)
    for position, (trials, first) in enumerate(_sizes(search, chunks), 1):
        steps = rungs(trials, chunks, search.eta, first)
        begins = (1, *(chunk + 1 for chunk, _ in steps))
        made = tuple(
            PlannedRung(number=next(numbers), bracket=position, chunk=chunk, keep=keep, first=begin)
            for begin, (chunk, keep) in zip(begins, steps, strict=False)
        )
        drawn.append(Bracket(number=position, trials=trials, rungs=made))
    if (total := sum(bracket.trials for bracket in drawn)) > MAX_TRIALS:
        raise UserError(
            f"the sweep has {total} trials, at most {MAX_TRIALS}.", remedy="Give fewer values to choose from."
        )
    return drawn


def check_trials(recipe: Recipe) -> int:
    """Makes sure that every trial of a sweep is a recipe, and returns how many there are.

    Those that a later bracket will draw are not known yet; every value of a list and both ends of a range are tried.
    """
    if recipe.sweep is None:
        raise UserError(
            f"recipe {recipe.name!r} has no sweep, expected what differs between its trials.",
            remedy="Add for example sweep: {parameters: {training.learning_rate: [1e-4, 3e-4]}}.",
        )
    planned = brackets(recipe)
    drawn = draw(recipe.sweep, recipe.seed, planned[0].trials)
    for values in value_ends(recipe.sweep.parameters):
        configured(recipe, values, "sweep.parameters")
    for number, values in enumerate(drawn):
        configured(recipe, values, f"trial t{number:03d}")
    return sum(bracket.trials for bracket in planned)


def _sizes(search: Search, chunks: int) -> list[tuple[int, int]]:
    if search.hyperband:
        return _hyperband(search.trials, chunks, search.hyperband.eta)
    total = search.trials or DEFAULT_TRIALS
    if search.method == "grid":
        total = len(grid(search.parameters))
    parts = min(search.brackets or (OPTUNA_BRACKETS if search.method == "optuna" else 1), total)
    return [(total // parts + (position < total % parts), 1) for position in range(parts)]


def _hyperband(trials: int | None, chunks: int, eta: int) -> list[tuple[int, int]]:
    """Returns the brackets of hyperband (arXiv:1603.06560, algorithm 1), scaled to `trials` where that is given."""
    deepest = 0
    while eta ** (deepest + 1) <= chunks:
        deepest += 1
    depths = range(deepest, -1, -1)
    sizes = [math.ceil((deepest + 1) / (depth + 1) * eta**depth) for depth in depths]
    if trials:
        exact = [trials * size / sum(sizes) for size in sizes]
        sizes = [max(int(share), 1) for share in exact]
        by_rest = sorted(range(len(sizes)), key=lambda at: exact[at] - int(exact[at]), reverse=True)
        for at in by_rest[: max(trials - sum(sizes), 0)]:
            sizes[at] += 1
    return [(size, max(chunks // eta**depth, 1)) for size, depth in zip(sizes, depths, strict=True)]
