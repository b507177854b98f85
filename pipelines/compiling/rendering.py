"""How a recipe's rows reach the model, as far as this machine can tell without a network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from baton.components.shared.models import chat_templates, conversing, loading
from baton.components.shared.recipe import Model, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDERED_ANYHOW = ("text", "messages", "sharegpt")
"""Formats in which nothing is left to `data.render_as`."""


def report(recipe: Recipe) -> Iterator[str]:
    """Yields for each training whose rows may be texts whether they become turns of a conversation, in words."""
    for part in recipe.phase_recipes() or [recipe]:
        asked = part.data.render_as != "auto" or part.model.base
        if not asked or part.training.method == "pretrain" or part.data.format in RENDERED_ANYHOW:
            continue
        prefix = f"{part.name}: " if recipe.phases else ""
        chat = _is_chat(part, recipe.model)
        if chat is None:
            depends = f"if {_origin(recipe.model)} has a chat template, which cannot be seen from here"
            yield f"{prefix}{conversing.TURNS} {depends} (data.render_as: {part.data.render_as})"
        else:
            yield prefix + conversing.told(_begun(part, recipe), chat=chat)


def check(recipe: Recipe) -> None:
    """Checks that there is a chat template where one is asked for, if that can be seen here.

    Raises:
        UserError: there is none.
    """
    for part in recipe.phase_recipes() or [recipe]:
        if part.data.render_as == "chat" and (tokenizer := _tokenizer(recipe.model)) is not None:
            conversing.require_template(_begun(part, recipe), tokenizer)


def check_rows(part: Recipe, start: Model, rows: list[dict[str, Any]]) -> None:
    """Checks that rows can be rendered as a training asks for, as far as that can be seen here.

    Args:
        part: The training.
        start: The model that the recipe's first training begins with.
        rows: Rows of the split.

    Raises:
        UserError: they cannot.
    """
    chat = _is_chat(part, start)
    if chat is not None:
        for row in rows:
            conversing.changes(row, part, chat=chat)


def _begun(part: Recipe, recipe: Recipe) -> Recipe:
    """Returns a training with the model that the first one starts from, whose tokenizer it has."""
    return part.model_copy(update={"model": part.model.model_copy(update={"base": recipe.model.base})})


def _is_chat(part: Recipe, start: Model) -> bool | None:
    """Returns whether texts become turns, None where the tokenizer cannot be seen."""
    if part.data.render_as == "text":
        return False
    if start.tokenizer and start.tokenizer.train:
        return part.data.render_as == "chat"
    tokenizer = _tokenizer(start)
    return None if tokenizer is None else conversing.applies(part, tokenizer)


def _tokenizer(start: Model) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer that a recipe's first training begins with, if it is on this machine; it runs no code."""
    origin, revision = _origin(start), None if start.tokenizer and start.tokenizer.base else start.revision
    if origin is None or "://" in origin:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = (
            loading.load_tokenizer(origin)
            if os.path.isdir(origin)
            else AutoTokenizer.from_pretrained(
                origin, revision=revision, local_files_only=True, trust_remote_code=False
            )
        )
    except Exception:  # it is not here, or of a kind that only its own code reads; the tokenize stage tells which
        return None
    if start.chat_template:
        tokenizer.chat_template = chat_templates.chat_template(start.chat_template)
    return tokenizer


def _origin(start: Model) -> str | None:
    return start.tokenizer.base if start.tokenizer and start.tokenizer.base else start.base
