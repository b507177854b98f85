"""Text of others on a terminal: rows, answers of models and messages that quote them are shown, and never obeyed."""

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Terminal commands, except line ends and tabs; and marks of text direction.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Returns a text in which what would be a command to a terminal is written out, as `\\x1b`."""
    return _COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class Terminal(Console):
    """A console that writes out what would be a command to the terminal and is not its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the printed segments: rich's own commands are segments of their own, and styles are added later."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
