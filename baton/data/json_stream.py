"""JSON files that are not lines: an array, or objects one after the other, read value by value."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator

from baton.data.files import BLOCK, as_row
from baton.data.rows import (
    MAX_ROW,
    SHOWN,
    TOKEN,
    TOO_LONG,
    SourceRow,
    UnreadableError,
    UnusableRow,
    as_read,
    require_few_signs,
    row_value,
)

SPACE = re.compile(r"[ \t\r\n]*")
LONGEST_TOKEN = 16
"""Characters from the end within which an error may come from a literal or an escape that is cut there."""

_ESCAPED = re.compile("[\udc80-\udcff]")


def is_array(head: bytes) -> bool:
    """Tells whether a text begins with an array of objects."""
    return re.match(rb"\s*\[\s*{", head) is not None


def values(file: str, stream: Iterable[bytes]) -> Iterator[SourceRow | UnusableRow]:
    """Reads the objects of an array, or those that stand one after the other; a row's number is its place, from 1.

    A broken value is rejected alone where its brackets tell where it ends.

    Args:
        file: Its address.
        stream: Its bytes.

    Raises:
        UnreadableError: after a place, values cannot be told apart.
    """
    text = _Text(stream)
    in_array = text.peek() == "["
    text.at += in_array
    number = 1
    try:
        while (sign := text.peek()) and not (in_array and sign == "]"):
            yield text.value(file, number, in_array)
            number += 1
            sign = text.peek()
            if in_array and sign == ",":
                text.at += 1
            elif in_array and sign and sign != "]":
                raise text.damaged("broken JSON: expected , or ]")
        if in_array and not sign:
            raise text.damaged("broken JSON: the array does not end")
        text.at += in_array
        if text.peek() or text.broken_off:
            raise text.damaged("broken JSON: text after the array")
    except UnreadableError as error:
        raise UnreadableError(error.reason, number, error.raw or text.rest()) from None


class _Text:
    """A window on a text, which moves on as values are taken."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = iter(stream)
        # Bytes that are not UTF-8 travel as surrogates, so that only their value is lost.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self.at = 0
        self._ended = False
        self._error: UnreadableError | None = None

    def more(self) -> bool:
        """Reads as much again as is there, so that a long value is looked at few times; tells whether there was any."""
        wanted = max(len(self._text) - self.at, BLOCK)
        blocks = [self._text[self.at :]]
        while wanted > 0 and not self._ended:
            try:
                block = next(self._stream, b"")
            except UnreadableError as error:  # what came before it is read first
                self._error, block = error, b""
            self._ended = not block
            blocks.append(self._decoder.decode(block, final=self._ended))
            wanted -= len(blocks[-1])
        before = len(blocks[0])
        self._text, self.at = "".join(blocks), 0
        return len(self._text) > before

    def peek(self) -> str:
        """Moves over white space and returns the next character, none at the end."""
        while True:
            self.at = SPACE.match(self._text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self.at < len(self._text) or not self.more():
                return self._text[self.at : self.at + 1]

    def value(self, file: str, number: int, in_array: bool) -> SourceRow | UnusableRow:
        """Takes the next value."""
        while True:
            try:
                require_few_signs(self._text, self.at)
                value, end = row_value(lambda decoder: decoder.raw_decode(self._text, self.at))
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - LONGEST_TOKEN
                if cut and self._may_grow() and self.more():
                    continue
                return self._broken(file, number, f"broken JSON: {error.msg}", in_array)
            except (ValueError, RecursionError) as error:  # a number of too many digits, too deep or too many
                return self._broken(file, number, f"broken JSON: {error}", in_array)
            if end == len(self._text) and self._may_grow() and self.more():
                continue  # a number may continue
            raw, self.at = self._text[self.at : end], end
            if len(raw) > MAX_ROW:
                return UnusableRow(file, number, TOO_LONG, _as_read(raw[:SHOWN]))
            if _ESCAPED.search(raw):
                return UnusableRow(file, number, "not UTF-8", _as_read(raw))
            return as_row(file, number, value, raw)

    def _broken(self, file: str, number: int, reason: str, in_array: bool) -> UnusableRow:
        """Takes a value that cannot be read, up to where its brackets close.

        Raises:
            UnreadableError: they do not.
        """
        while (end := self._end(in_array)) is None:
            if not self._may_grow() or not self.more():
                raise self.damaged(reason if self._may_grow() else f"broken JSON: {TOO_LONG}")
        raw, self.at = self._text[self.at : end], end
        return UnusableRow(file, number, reason, _as_read(raw))

    def _end(self, in_array: bool) -> int | None:
        depth = 0
        for token in TOKEN.finditer(self._text, self.at):
            sign = token[0]
            depth += (sign in "[{") - (sign in "]}")
            if in_array and (depth < 0 or (depth == 0 and sign == ",")):
                return token.start()
            if not in_array and depth <= 0 and sign in "]}":
                return token.end()
        return None

    def _may_grow(self) -> bool:
        return len(self._text) - self.at <= MAX_ROW

    @property
    def broken_off(self) -> bool:
        """Whether the file breaks off where the text ends."""
        return self._error is not None

    def rest(self) -> bytes:
        """Returns the beginning of what was not taken."""
        return self._text[self.at : self.at + SHOWN].encode("utf-8", "surrogateescape")

    def damaged(self, reason: str) -> UnreadableError:
        """Returns the error of a text in which nothing more can be told apart."""
        return UnreadableError(self._error.reason if self._error else reason, raw=self.rest())


def _as_read(text: str) -> str:
    return as_read(text.encode("utf-8", "surrogateescape"))
