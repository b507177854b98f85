"""Checks that look at one row at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from baton.components.data_split.quality import private, texts
from baton.components.data_split.quality.ledger import Finding
from baton.components.data_split.quality.texts import Row
from baton.components.shared.recipe import Recipe

RowCheck = Callable[[Row], Finding | None]

CHECKS = ("encoding", "control_characters", "same_answers", "empty", "turns", "secrets", "emails")
"""In the order in which they see a row: text is mended before it is judged."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that chat templates know."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Unicode's control characters (Cc) but tab, line feed and carriage return."""


def checks(recipe: Recipe) -> dict[str, RowCheck]:
    """Returns the checks of single rows, in their order."""
    quality = recipe.data.quality
    return {
        "encoding": encoding,
        "control_characters": control_characters,
        "same_answers": same_answers,
        "empty": lambda row: near_empty(row, quality.near_empty_characters),
        "turns": turns,
        "secrets": lambda row: _private(row, private.secrets, private.SECRET),
        "emails": lambda row: _private(row, private.emails, private.EMAIL),
    }


def encoding(row: Row) -> Finding | None:
    """Finds text that was decoded with the wrong table, by ftfy's heuristic, and U+FFFD, which nothing can mend."""
    damaged = [text for text in texts.row_texts(row) if not text.isascii() and _is_damaged(text)]
    if not damaged:
        return None
    import ftfy

    mended = texts.changed_row(row, ftfy.fix_encoding)
    if mended == row:
        return Finding("replacement characters (U+FFFD)", damaged[0], damaged[0].find("\ufffd"), row)
    text = next((text for text in damaged if ftfy.fix_encoding(text) != text), damaged[0])
    shown, meant = private.masked(text), private.masked(ftfy.fix_encoding(text))
    place = next((at for at, pair in enumerate(zip(shown, meant, strict=False)) if pair[0] != pair[1]), 0)
    return Finding(f"decoded with the wrong table: {meant[place : place + 20]!r} is meant", text, place, mended)


def _is_damaged(text: str) -> bool:
    import ftfy.badness

    return "\ufffd" in text or (bool(ftfy.badness.is_bad(text)) and ftfy.fix_encoding(text) != text)


def control_characters(row: Row) -> Finding | None:
    """Finds control characters but tab and line break."""
    for text in texts.row_texts(row):
        if match := _CONTROL.search(text):
            mended = texts.changed_row(row, lambda part: _CONTROL.sub("", part))
            return Finding(f"control character U+{ord(match[0]):04X}", text, match.start(), mended)
    return None


def same_answers(row: Row) -> Finding | None:
    """Finds preferences whose answers differ in white space at most."""
    if "chosen" not in row or "rejected" not in row:
        return None
    chosen, rejected = (" ".join(" ".join(texts.texts(row[side])).split()) for side in ("chosen", "rejected"))
    return Finding("chosen and rejected are the same", chosen) if chosen == rejected else None


def near_empty(row: Row, least: int) -> Finding | None:
    """Finds fields with fewer visible characters than `least`, and turns of a conversation with none.

    Of a conversation, the text is what the assistant says in it. A turn that calls a tool may have no text.
    """
    for name in ("text", "prompt", "completion", "messages", "chosen", "rejected"):
        value = row.get(name)
        if isinstance(value, list):
            for number, message in enumerate(value, 1):
                if not any(texts.has_visible(text, 1) for text in texts.texts(message)):
                    return Finding(f"turn {number} of {name} has no text", _summary(row))
            answers = [message for message in value if message.get("role") == "assistant"]
            value = " ".join(text for message in answers for text in texts.texts(message)) if answers else None
        if isinstance(value, str) and not texts.has_visible(value, least):
            return Finding(f"{name} has fewer than {least} visible characters", _summary(row))
    return None


def turns(row: Row) -> Finding | None:
    """Finds conversations with unknown roles, or in which user and assistant do not take turns."""
    if isinstance(row.get("messages"), list):
        talks = [(row["messages"], True)]
    elif isinstance(row.get("prompt"), list):
        ends = [row[side] for side in ("chosen", "rejected", "completion") if isinstance(row.get(side), list)]
        talks = [(row["prompt"] + end, True) for end in ends] or [(row["prompt"], False)]
    else:
        return None
    for talk, is_answered in talks:
        if reason := _out_of_turn([str(message.get("role")) for message in talk], is_answered):
            return Finding(reason, _summary(row))
    return None


def _out_of_turn(roles: list[str], is_answered: bool) -> str | None:
    before = "system"
    for number, role in enumerate(roles, 1):
        if role not in ROLES:
            return f"turn {number} has the unknown role {role!r}"
        if role in ("system", "developer"):
            continue
        if role == "user" and before == "user":
            return f"turn {number} is the user's, as the one before"
        if role == "assistant" and before == "assistant":
            return f"turn {number} is the assistant's, as the one before"
        if role != "user" and before == "system":
            return f"turn {number} is the {role}'s, before the user has said anything"
        before = role
    if is_answered and before == "user":
        return "the last turn is the user's and has no answer"
    return None


def _private(row: Row, find: Callable[[str], list[private.Span]], word: str) -> Finding | None:
    places = [(text, spans) for text in texts.row_texts(row) if (spans := find(text))]
    if not places:
        return None
    kinds = dict.fromkeys(span.kind for _, spans in places for span in spans)
    text, spans = places[0]
    mended = texts.changed_row(row, lambda part: private.without(part, find(part), word))
    return Finding(", ".join(kinds), private.without(text, spans, word), spans[0].start, mended)


def _summary(row: Row) -> str:
    return " · ".join(f"{name}: {_shown(value)}" for name, value in row.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        shown = ((part.get("role", "tool declared"), " ".join(texts.texts(part))) for part in value)
        return " / ".join(f"{label}: {text}" for label, text in shown)
    return str(value)
