"""The rungs of a sweep: after which chunk trials are compared and how many advance. Pure functions of a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import MAX_TRIALS, Recipe, Search
from baton.components.shared.sweeps.configurations import configured, draw, ends, grid

DEFAULT_TRIALS = 8
OPTUNA_BRACKETS = 3


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One comparison.

    Attributes:
        number: Its number in the sweep, from 1.
        bracket: Its bracket's number, from 1.
        chunk: Chunk after which trials are compared.
        keep: How many advance; at a bracket's last rung, which is after the last chunk, all but one are beaten.
        first: The first chunk that trials train for it.
    """

    number: int
    bracket: int
    chunk: int
    keep: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """Trials that are compared with each other, from their first chunk on.

    Attributes:
        number: From 1.
        trials: How many there are.
        rungs: Their comparisons, in order.
    """

    number: int
    trials: int
    rungs: tuple[Rung, ...]


def rungs(trials: int, chunks: int, eta: int | None, first: int = 1) -> list[tuple[int, int]]:
    """Returns after which chunks trials are compared, and how many advance from there.

    Args:
        trials: How many begin.
        chunks: Chunks of a run.
        eta: One of so many advances; None compares at the end only.
        first: Chunk of the first comparison; each next one is after `eta` times as many.

    Returns:
        Pairs of chunk and number of those that advance; the last is the last chunk, with one.
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
    """Returns the brackets of a recipe's sweep.

    Raises:
        UserError: they have too many trials.
    """
    search, chunks = recipe.sweep, recipe.num_chunks
    assert search is not None
    drawn: list[Bracket] = []
    numbers = count(1)
    for position, (trials, first) in enumerate(_sizes(search, chunks), 1):
        steps = rungs(trials, chunks, search.eta, first)
        begins = (1, *(chunk + 1 for chunk, _ in steps))
        made = tuple(
            Rung(number=next(numbers), bracket=position, chunk=chunk, keep=keep, first=begin)
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

    Raises:
        UserError: there is no sweep, a trial is no recipe, or there are too many of them.
    """
    if recipe.sweep is None:
        raise UserError(
            f"recipe {recipe.name!r} has no sweep, expected what differs between its trials.",
            remedy="Add for example sweep: {parameters: {training.learning_rate: [1e-4, 3e-4]}}.",
        )
    planned = brackets(recipe)
    drawn = draw(recipe.sweep, recipe.seed, planned[0].trials)
    for values in ends(recipe.sweep.parameters):
        configured(recipe, values, "sweep.parameters")
    for number, values in enumerate(drawn):
        configured(recipe, values, f"trial t{number:03d}")
    return sum(bracket.trials for bracket in planned)


def _sizes(search: Search, chunks: int) -> list[tuple[int, int]]:
    """Returns of each bracket how many trials it has and the chunk of its first rung."""
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
