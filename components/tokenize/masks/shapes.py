"""A conversation's shape: its texts replaced by placeholders, so that a rendering shows where each of them goes.

A template that writes the shape and one that writes the conversation do the same but for the texts. Where the rendering
of a conversation is that of its shape with the texts in their places, every place in the shape's rendering is known in
the conversation's; where it is not, nothing is concluded.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.components.tokenize.masks.template import Conversation, Message

STEMS = ("Zxqj", "Qwvz", "Jkqx", "Vhzq")
"""What placeholders begin with; one that the conversation does not hold."""
TAGS = re.compile(r"((?:(?<!\s)\s+)?(?:<[^<>]*>|\[/?[A-Z_]+\])\s*)")
"""What a template may look for within a text, such as `</think>`."""


class Leaf(NamedTuple):
    """A text that a placeholder stands for.

    Attributes:
        message: Number of the message it is of.
        text: The text.
    """

    message: int
    text: str


@dataclass(frozen=True)
class Shape:
    """A conversation with placeholders.

    Attributes:
        conversation: It.
        leaves: What the placeholders stand for, by their number.
        stem: What a placeholder begins with.
    """

    conversation: Conversation
    leaves: list[Leaf]
    stem: str

    @property
    def key(self) -> str:
        """What shapes that look the same have in common."""
        return json.dumps([self.conversation.messages, self.conversation.tools])


@dataclass(frozen=True)
class Place:
    """A placeholder in a rendering.

    Attributes:
        leaf: Its number.
        start: Where it begins, in characters.
        end: Where it ends.
    """

    leaf: int
    start: int
    end: int


def shape_of(conversation: Conversation, text: str, *, fine: bool) -> Shape | None:
    """Returns a conversation's shape.

    Args:
        conversation: Which.
        text: Its rendering.
        fine: Whether tags within a text stay, for templates that look for them.

    Returns:
        The shape, None where the conversation holds all the placeholders there are.
    """
    stem = next((stem for stem in STEMS if stem not in text), None)
    if stem is None:
        return None
    leaves: list[Leaf] = []

    def put(message: int, part: str) -> str:
        if not (inner := part.strip()):
            return part
        placeholder = f"{stem}{len(leaves):05d}"
        leaves.append(Leaf(message, inner))
        return placeholder if len(inner) == len(part) else part.replace(inner, placeholder, 1)

    def placed(message: int, value: str) -> str:
        if not fine:
            return put(message, value)
        parts = enumerate(TAGS.split(value))
        return "".join(part if number % 2 else put(message, part) for number, part in parts)

    messages = [_shaped(message, number, placed) for number, message in enumerate(conversation.messages)]
    return Shape(Conversation(messages, conversation.tools), leaves, stem)


def places(text: str, stem: str) -> list[Place]:
    """Returns the placeholders in a rendering, in their order."""
    return [Place(int(match[1]), match.start(), match.end()) for match in re.finditer(rf"{stem}(\d{{5}})", text)]


class Alignment:
    """Where places in a shape's rendering are in the conversation's.

    Args:
        ends: Ends of placeholders in the shape's rendering, ascending.
        shifts: How much further on a place after each of them is; one more for before the first.
    """

    def __init__(self, ends: list[int], shifts: list[int]) -> None:
        self._ends = ends
        self._shifts = shifts

    def __getitem__(self, at: int) -> int:
        return at + self._shifts[bisect_right(self._ends, at)]


def literals(text: str, found: list[Place]) -> list[str]:
    """Returns what stands between the placeholders in a rendering, before the first and after the last."""
    edges = [0, *(edge for place in found for edge in (place.start, place.end)), len(text)]
    return [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def align(text: str, between: list[str], found: list[Place], leaves: list[Leaf]) -> Alignment | None:
    """Returns how a conversation's rendering follows its shape's, None where it does not.

    Args:
        text: The conversation's.
        between: The shape's, without its placeholders; see `literals`.
        found: Its placeholders.
        leaves: What they stand for in the conversation.
    """
    written = [leaves[place.leaf].text for place in found]
    if text != "".join([part for pair in zip(between, written, strict=False) for part in pair] + between[-1:]):
        escaped = _as_written(text, between, written)
        if escaped is None:
            return None
        written = escaped
    shifts = [0]
    for place, each in zip(found, written, strict=True):
        shifts.append(shifts[-1] + len(each) - (place.end - place.start))
    return Alignment([place.end for place in found], shifts)


def _as_written(text: str, between: list[str], texts: list[str]) -> list[str] | None:
    """Returns texts as the template wrote them, None where they do not stand between its own words."""
    at = len(between[0])
    if not text.startswith(between[0]):
        return None
    written = []
    for each, following in zip(texts, between[1:], strict=True):
        form = next(
            (x for x in _forms(each) if text.startswith(x, at) and text.startswith(following, at + len(x))), None
        )
        if form is None:
            return None
        written.append(form)
        at += len(form) + len(following)
    return written if at == len(text) else None


def _forms(text: str) -> Iterator[str]:
    """Yields how a template may write a text: as it is, or within a string of JSON or of Python."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]


def _shaped(message: Message, number: int, placed: Callable[[int, str], str]) -> Message:
    shaped = dict(message)
    for name in ("reasoning_content", "content"):
        if isinstance(message.get(name), str):
            shaped[name] = placed(number, message[name])
    if message.get("tool_calls"):
        shaped["tool_calls"] = [
            {**call, "function": _arguments(call["function"], lambda text: placed(number, text))}
            for call in message["tool_calls"]
        ]
    return shaped


def _arguments(function: dict[str, Any], placed: Callable[[str], str]) -> dict[str, Any]:
    def each(value: Any) -> Any:
        if isinstance(value, str):
            return placed(value)
        if isinstance(value, dict):
            return {key: each(item) for key, item in value.items()}
        return [each(item) for item in value] if isinstance(value, list) else value

    return {**function, "arguments": each(function.get("arguments"))}
