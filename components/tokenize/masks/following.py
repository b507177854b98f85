"""The turns of a conversation in its rendering, by the shape that it follows."""

from __future__ import annotations

from collections.abc import Iterator

from baton.components.tokenize.masks.shapes import Alignment, align, shape_of
from baton.components.tokenize.masks.template import Rendered, Template
from baton.components.tokenize.masks.turns import Located, Turn

MOST_SHAPES = 2000
"""Shapes that are kept."""


class Turns:
    """Finds turns in what one template makes of conversations; shapes are looked at once.

    Args:
        template: The template.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._shapes: dict[str, Located | None] = {}

    def find(self, rendered: Rendered, numbers: list[int]) -> list[Turn] | str:
        """Returns messages' turns, in characters of the rendering, or why they cannot be told."""
        reason = "cannot tell which of its texts went where in what the chat template makes of it"
        for located, alignment in self._followed(rendered):
            turns: list[Turn] = []
            for number in numbers:
                turn = located.turn(number)
                if isinstance(turn, str):
                    reason = turn
                    break
                spans = [(alignment[start], alignment[end]) for start, end in turn.spans]
                if spans and (unwritten := located.unwritten(number)):
                    spans[0] = (_after(rendered.text, spans[0][0], unwritten), spans[0][1])
                turns.append(Turn(spans, turn.is_ended))
            else:
                return turns
        return reason

    def start(self, rendered: Rendered, number: int) -> int | None:
        """Returns where what an assistant's message says begins, in characters; None where unknown."""
        for located, alignment in self._followed(rendered):
            start = located.start(number)
            if start is not None:
                return _after(rendered.text, alignment[start], located.unwritten(number))
        return None

    def _followed(self, rendered: Rendered) -> Iterator[tuple[Located, Alignment]]:
        """Yields the shapes that a rendering follows, that without tags in texts first."""
        for fine in (False, True):
            shape = shape_of(rendered.conversation, rendered.text, fine=fine)
            if shape is None:
                return
            key = shape.key
            for _ in range(2):
                is_new = key not in self._shapes
                if is_new:
                    self._shapes = self._shapes if len(self._shapes) < MOST_SHAPES else {}
                    text = self._template.render(shape.conversation)
                    self._shapes[key] = Located(shape, text, self._template) if text is not None else None
                located = self._shapes[key]
                alignment = located and align(rendered.text, located.literals, located.places, shape.leaves)
                if located and alignment:
                    yield located, alignment
                    break
                if is_new:
                    break
                del self._shapes[key]  # a template may write the date, which has changed


def _after(text: str, start: int, unwritten: str) -> int:
    """Returns where a turn starts whose own text may begin with what the template makes the model begin with."""
    return start + len(unwritten) if text.startswith(unwritten, start) else start
