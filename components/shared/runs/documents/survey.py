"""Rows looked at before there is a recipe for them."""

from __future__ import annotations

from pydantic import Field

from baton.components.shared.core.document import Document


class Fit(Document):
    """What rows are to the methods that learn from the same formats."""

    methods: list[str]
    """Those methods."""
    format: str = ""
    """As `data.format`; empty where the columns fit none that these methods learn from."""
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    """Our column name → the source's, where they differ."""
    usable: int = 0
    """Rows that can be used, of those that were looked at."""
    reason: str = ""
    """Why they fit no format, or why the first unusable one is that."""
    is_chat: bool = False
    """Whether rows come out as messages."""
    turns: int = 0
    """Most messages of a row."""
    answers: int = 0
    """Rows whose prompt has an answer for rewards to look at."""
    numbers: int = 0
    """Those of them whose answer ends in a number."""
    good: int = 0
    """Of rated rows, the good ones."""
    characters: list[int] = Field(default_factory=list)
    """Characters of rows: of half, of 99 in 100 and of all at most."""


class Survey(Document):
    """Sources as they were found."""

    columns: list[str]
    """Names of their columns; none where they are plain text."""
    looked_at: int
    """Rows that were looked at, the first ones."""
    rows: int | None
    """All of their rows; None where they were not counted."""
    files: dict[str, int] = Field(default_factory=dict)
    """Type of file → how many of it."""
    fits: list[Fit]
    """A fit for each group of methods."""

    def of(self, method: str) -> Fit:
        """Returns what the rows are to a method."""
        return next(fit for fit in self.fits if method in fit.methods)
