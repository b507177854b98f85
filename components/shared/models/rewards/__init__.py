"""Reward functions: each judges a list of completions with one number apiece.

A ready one is a file here with `make(**options)`; the user's own are found by `module:object`. All are called as TRL
calls them: `prompts` and `completions` as lists of texts or of messages, the row's other columns as lists of texts.
Which of the two goes by the row as it was brought: a prompt that is a text is judged as text, with `data.separator` at
its end, also where the model saw it as a turn of a conversation, which is then in `prompt_messages`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.models.conversing import PROMPT_TEXT
from baton.components.shared.models.own_code import hooks
from baton.components.shared.recipe import RewardFunction
from baton.components.shared.recipe.methods import REWARDS

Judge = Callable[..., list[float | None]]


def build(functions: list[RewardFunction]) -> list[Judge]:
    """Returns the functions of a recipe, each with the name that its values are logged under.

    Raises:
        UserError: one cannot be found, or does not take its options.
    """
    return [_build(function) for function in functions]


def bind(functions: list[Any], trainer: Any) -> None:
    """Gives those functions that ask for it the trainer they judge for."""
    for function in functions:
        if hasattr(function, "bind"):
            function.bind(trainer)


def name(function: Any) -> str:
    """Returns what a function's values are called."""
    return str(function.__name__)


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row's columns as functions see them where its prompt was a text and became a conversation."""
    rest = {name: value for name, value in row.items() if name != PROMPT_TEXT}
    return {**rest, "prompt_messages": row["prompt"]}


def text(completion: Any) -> str:
    """Returns what a completion says, given as text or as messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def _build(function: RewardFunction) -> Judge:
    if function.use not in REWARDS:
        reward = hooks.find(function.use)
        judge: Any = functools.partial(reward, **function.options) if function.options else reward
        return _named(judge, function.use.rpartition(":")[2])
    from baton.components.shared.models.rewards.exact import make as exact
    from baton.components.shared.models.rewards.format import make as format
    from baton.components.shared.models.rewards.information_gain import make as information_gain
    from baton.components.shared.models.rewards.length import make as length
    from baton.components.shared.models.rewards.numeric import make as numeric

    ready: dict[str, Callable[..., Any]] = {
        "exact": exact,
        "format": format,
        "length": length,
        "numeric": numeric,
        "information_gain": information_gain,
    }
    try:
        return _named(ready[function.use](**function.options), function.use)
    except TypeError as error:
        raise UserError(f"reward {function.use!r} does not take these options: {error}.") from None


def _named(judge: Any, name: str) -> Judge:
    if not hasattr(judge, "__name__"):
        judge.__name__ = name
    return judge  # type: ignore[no-any-return]
