"""The texts of a normalised row, whatever its shape."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]

LEARNED = ("text", "prompt", "completion", "messages", "chosen", "rejected", "answer")
"""Fields that say what is learned; what else a row has are the user's extra columns."""

_WORD = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]|\w+")
"""A word, or a character of a script that puts no spaces between words."""


def _labels(value: dict[str, Any]) -> tuple[str, ...]:
    """Returns the keys of a message, or of a tool or its call, whose values nobody says."""
    return ("id", "type") if isinstance(value.get("function"), dict) else ("role", "tool_call_id")


def texts(value: Any) -> Iterator[str]:
    """Yields every text in a column's value, in order; the roles of a conversation are no texts, nor are ids."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in _labels(value):
                yield from texts(part)


def row_texts(row: Row) -> Iterator[str]:
    """Yields every text of a row, in order."""
    for value in row.values():
        yield from texts(value)


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a column's value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [changed(part, change) for part in value]
    if isinstance(value, dict):
        return {key: part if key in _labels(value) else changed(part, change) for key, part in value.items()}
    return value


def changed_row(row: Row, change: Callable[[str], str]) -> Row:
    """Returns a row with every text changed."""
    return {name: changed(value, change) for name, value in row.items()}


def learned(row: Row) -> str:
    """Returns what is learned from a row as one text."""
    return "\n".join(text for name in LEARNED if name in row for text in texts(row[name]))


def is_emptied(before: Row, after: Row) -> bool:
    """Tells whether a change of a row left nothing of a text that is learned from."""
    pairs = (
        pair for name in LEARNED if name in before for pair in zip(texts(before[name]), texts(after[name]), strict=True)
    )
    return any(old != new and not new.strip() for old, new in pairs)


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return _WORD.findall(text.lower())


def has_visible(text: str, least: int) -> bool:
    """Tells whether a text has at least so many characters that can be seen."""
    seen = 0
    for character in text:
        seen += not character.isspace() and unicodedata.category(character)[0] != "C"
        if seen >= least:
            return True
    return least == 0


def excerpt(text: str, start: int = 0) -> str:
    """Returns the part of a text around a place, marked where it was cut."""
    begin = max(0, start - 80)
    end = begin + 240
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
