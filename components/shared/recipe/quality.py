"""What is looked for in the rows before a GPU is paid for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.components.shared.recipe.base import Fraction, Positive, Section

Action = Literal["off", "warn", "fix", "fail"]
"""`warn` says what was found, `fix` mends or drops the rows and keeps them with the reason, `fail` ends the run."""


class Quality(Section):
    """Checks of the rows, each `off`, `warn`, `fix` or `fail`. What `fix` changes or drops is kept with its reason."""

    empty: Action = "warn"
    """Fields with next to nothing in them (rows with an empty one are rejected in any case); `fix` drops the row."""
    duplicates: Action = "warn"
    """Rows with the same content; `fix` keeps one."""
    near_duplicates: Action = "warn"
    """Rows nearly the same as another (MinHash over word shingles); `fix` keeps one."""
    leakage: Action = "warn"
    """Training rows nearly the same as a held-out one; `fix` drops them from training."""
    encoding: Action = "warn"
    """Text that was decoded with the wrong table, and replacement characters; `fix` mends what can be."""
    control_characters: Action = "warn"
    """Control characters but tab and line break; `fix` removes them."""
    turns: Action = "warn"
    """Conversations with unknown roles, or in which user and assistant do not take turns; `fix` drops them."""
    language: Action = "warn"
    """Rows in another language than `languages`; `fix` drops them. The mix is always shown."""
    secrets: Action = "warn"
    """Keys, tokens and passwords that look real; `fix` replaces them by `[SECRET]`."""
    emails: Action = "warn"
    """E-mail addresses that look real; `fix` replaces them by `[EMAIL]`."""
    few_rows: Action = "warn"
    """Fewer training rows than the method needs; there is nothing to fix."""
    same_answers: Action = "fix"
    """Preferences whose chosen and rejected answers are the same; `fix` drops them."""
    truncation: Action = "warn"
    """More than `truncated_share` of the rows longer than `max_length`; `fix` drops the rows that would be cut."""
    near_empty_characters: Positive = 3
    """Fields with fewer visible characters count as near-empty."""
    near_duplicate_threshold: Fraction = 0.85
    """Jaccard similarity of the words from which rows are near duplicates."""
    languages: list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]] = []
    """Languages that are expected, as ISO 639 codes; any when left out."""
    truncated_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of rows that may be cut before `truncation` speaks up."""
    least_rows: Positive | None = None
    """Training rows below which `few_rows` speaks up; by the method when left out."""
