"""Rows as the model sees them, for people."""

from __future__ import annotations

from pydantic import Field

from baton.components.shared.core.document import Document


class Place(Document):
    """Where a row stands."""

    file: str
    """Address of its file."""
    line: int
    """Line or row number, from 1."""


class Token(Document):
    """A token of a row."""

    id: int
    text: str
    """What it stands for; bytes that are no whole character by themselves as `\\xNN`."""
    trained: bool
    """Whether it is learned from."""


class Span(Document):
    """Neighbouring tokens that are treated alike, as one text."""

    text: str
    tokens: int
    trained: bool = False
    cut: bool = False
    """Whether it lies beyond `data.max_length`."""
    left_out: bool = False
    """Whether it stands for tokens that are not among those of the row, to keep that short."""


class SeenRow(Document):
    """A sequence as the model sees it, or a row that it does not see and why.

    A pair has two, with its answers `chosen` and `rejected`; both begin with the prompt.
    """

    source: Place
    side: str | None = None
    """`train`, `eval` or `test`; None where all rows must be known to tell."""
    part: str = ""
    """`chosen`, `rejected`, `completion` or `prompt`; empty for rows of one sequence."""
    label: bool | None = None
    """Of a rated row: whether its answer is a good one."""
    columns: dict[str, str] = Field(default_factory=dict)
    """What reward functions get beside the prompt."""
    text: str = ""
    tokens: list[Token] = Field(default_factory=list)
    """Those that are cut too."""
    length: int = 0
    """Number of tokens."""
    kept: int = 0
    """Tokens that are left by `data.max_length`, from the first on."""
    learned: int = 0
    """Tokens that are learned from."""
    spans: list[Span] = Field(default_factory=list)
    rejected: str | None = None
    """Why it cannot be used."""


class Seen(Document):
    """The first rows of a recipe as the model sees them."""

    method: str
    max_length: int
    joined: bool = False
    """Whether rows are joined and cut: what does not fit is in the next sequence."""
    note: str = ""
    """What is not as in the run."""
    rows: list[SeenRow] = Field(default_factory=list)
