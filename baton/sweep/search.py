"""Values of a sweep's trials, and its rungs: pure functions of the recipe, the seed and earlier scores.

Values are all combinations, drawn at random, or proposed by Optuna.
"""

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

Values = dict[str, Any]  # dotted path → value
Parameters = Mapping[str, "list[Any] | Range"]

TRIES = 100  # draws in a row without a new configuration, after which a random search takes one twice
STARTUP = 10  # known trials from which on TPE models them; before it draws


@dataclass(frozen=True, kw_only=True)
class Known:
    """A trial of an earlier bracket."""

    values: Values
    scores: dict[int, float] = field(default_factory=dict)  # by chunk, without those that are no number
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
    """Returns every combination; the last parameter changes first."""
    choices = [values if isinstance(values, list) else values.stepped() or [] for values in parameters.values()]
    return [dict(zip(parameters, combination, strict=True)) for combination in product(*choices)]


def value_ends(parameters: Parameters) -> list[Values]:
    """Returns configurations that together have each value of a list and both ends of a range."""
    tried: dict[str, list[Any]] = {
        path: values if isinstance(values, list) else [values.min, values.max] for path, values in parameters.items()
    }
    longest = max(len(values) for values in tried.values())
    return [{path: values[min(at, len(values) - 1)] for path, values in tried.items()} for at in range(longest)]


def configured(recipe: Recipe, values: Values, name: str) -> Recipe:
    """Returns a trial's recipe: without a sweep, and with its values."""
    document = recipe.model_dump(mode="json")
    document["sweep"] = None
    for path, value in values.items():
        try:
            load.set_path(document, path, value)
        except KeyError as error:
            raise UserError(
                f"sweep.parameters.{path}: {error.args[0]!r} is a value, it has no keys below it."
            ) from None
    # A trial's length replaces the recipe's, which may be given in the other unit.
    if values.get("training.max_steps") is not None and "training.epochs" not in values:
        document["training"]["epochs"] = None
    if values.get("training.epochs") is not None and "training.max_steps" not in values:
        document["training"]["max_steps"] = None
    return load.validate(document, origin=f"{name}: {describe_values(values)}")


def describe_values(values: Values) -> str:
    """Returns `training.learning_rate=0.0001, training.batch_size=8`."""
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
    """Asks TPE for a batch of trials, given those before.

    A stopped trial counts as pruned, with its score after each chunk: TPE ranks it below the finished, by its progress
    and score. Trials without a score are left out. A value of a list is given as its position, whatever its type.
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


@dataclass(frozen=True, kw_only=True)
class PlannedRung:
    """Comparison of a bracket's trials after a chunk; the last, after the last chunk, keeps one. Numbers are from 1."""

    number: int
    bracket: int
    chunk: int
    keep: int
    first: int  # first chunk that trials train for it


@dataclass(frozen=True, kw_only=True)
class Bracket:
    number: int
    trials: int
    rungs: tuple[PlannedRung, ...]


def rungs(trials: int, chunks: int, eta: int | None, first: int = 1) -> list[tuple[int, int]]:
    """Returns the chunks after which trials are compared, and how many advance; from the last, one.

    One of `eta` advances; None compares at the end only. The first comparison is after chunk `first`, each next after
    `eta` times as many chunks.
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
    """Makes sure that every trial is a valid recipe, and returns their number."""
    # Trials of later brackets are not known yet: every value of a list and both ends of a range are tried instead.
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
    parts = min(search.num_brackets or 1, total)
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
