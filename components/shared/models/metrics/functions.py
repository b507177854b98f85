"""The user's own measures of what the model writes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from baton.components.shared.core.errors import UserError, in_words
from baton.components.shared.models.metrics.figures import Figure, mean
from baton.components.shared.models.metrics.texts import METRICS
from baton.components.shared.models.own_code import hooks
from baton.components.shared.recipe import Hook
from baton.components.shared.recipe.evaluation import ROUGE
from baton.components.shared.recipe.methods.spec import AGAINST_BASELINE

TAKEN = {*METRICS, *ROUGE, *AGAINST_BASELINE, "bertscore", "loss", "perplexity", "tokens", "accuracy", "margin"}
"""Names of figures that are Baton's own."""

Function = Callable[..., Any]


def load(configured: Sequence[Hook]) -> dict[str, Function]:
    """Returns the functions by the names that their figures have: what follows the colon.

    Raises:
        UserError: one cannot be found, or has the name of another figure.
    """
    loaded: dict[str, Function] = {}
    for hook in configured:
        name = hook.use.rpartition(":")[2]
        if name in loaded or name in TAKEN or name.partition("_")[0] == "reward":
            raise UserError(
                f"evaluation.functions: {hook.use!r} has the name of another figure, {name!r}.", remedy="Rename it."
            )
        loaded[name] = functools.partial(hooks.find(hook.use), **hook.options)
    return loaded


def score(
    name: str, function: Function, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]
) -> Figure:
    """Returns the mean of what a function says of each row; None and NaN say nothing of it.

    Raises:
        UserError: it fails, or does not return a number for each row.
    """
    try:
        values = function(prompts=list(prompts), completions=list(completions), references=list(references))
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"evaluation.functions: {name} failed: {in_words(error)}.") from None
    return mean(numbers(f"evaluation.functions: {name}", values, len(completions)), better=None)


def numbers(function: str, values: Any, rows: int) -> list[float | None]:
    """Returns what a user's function gave as numbers, None for a row of which it says nothing.

    Args:
        function: Setting and name, for messages.
        values: The function's answer.
        rows: Rows it was asked about.

    Raises:
        UserError: the answer is not a number for each row.
    """
    try:
        given = [None if value is None or math.isnan(float(value)) else float(value) for value in values]
    except (TypeError, ValueError):
        raise UserError(f"{function} returned {values!r:.200}, expected a list of numbers.") from None
    if len(given) != rows:
        raise UserError(f"{function} returned {len(given)} numbers for {rows} rows, expected one for each.")
    return given
