"""Rows and rejected rows, as readers return them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.components.shared.core.errors import BatonError

MAX_ROW = 2**26
"""Longest row in bytes, 64 MiB: what bounds the memory that reading takes."""

TOO_LONG = f"longer than {MAX_ROW >> 20} MiB"
SHOWN = 1000
"""Bytes kept of what is longer than that."""


@dataclass(frozen=True)
class Rejected:
    """A row that could not be used.

    Attributes:
        file: Address of its file.
        line: Line or row number, from 1.
        reason: Why.
        raw: The row as read, bytes that are not UTF-8 escaped as `\\xNN`.
        rest: Whether it stands for everything from there on: the file breaks off, and nobody knows how many rows that
            hides.
    """

    file: str
    line: int
    reason: str
    raw: str
    rest: bool = False


@dataclass(frozen=True)
class Row:
    """A row as found, with where it stood."""

    file: str
    line: int
    values: dict[str, object]


class UnreadableError(BatonError):
    """After a place, nothing more can be read from a file.

    Args:
        reason: Why.
        line: Line or row number of the place, from 1.
        raw: What was read of that row.
    """

    def __init__(self, reason: str, line: int = 1, raw: bytes = b"") -> None:
        super().__init__(reason)
        self.reason, self.line, self.raw = reason, line, raw


def as_read(data: bytes) -> str:
    """Returns bytes as text, those that are not UTF-8 escaped as `\\xNN`."""
    return data.decode("utf-8", "backslashreplace")
