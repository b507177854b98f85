"""Rows to learn from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from components.shared.recipe.base import Fraction, Positive, Section

COLUMNS = (
    "text", "prompt", "completion", "instruction", "input", "output", "messages", "chosen", "rejected", "label",
    "answer",
)  # fmt: skip
"""The column names Baton knows, to which `data.columns` maps the source's own."""


class Data(Section):
    """Rows to learn from, and how they become tokens."""

    source: Annotated[list[str], Field(min_length=1)]
    """File, folder, glob, `s3://…`, `hf://datasets/…` or `builtin:stdlib-docs`; one or a list."""
    format: Literal[
        "auto", "text", "prompt-completion", "instruction", "messages", "preference", "rated", "prompt"
    ] = "auto"  # fmt: skip
    """Shape of a row; `auto` looks at the method and the columns of the first rows and says what it found. A preference
    has `chosen` and `rejected`, with a `prompt` or as whole conversations; a rated row has `prompt`, `completion` and
    `label`, true for a good one; a prompt may have an `answer` and further columns for reward functions."""
    columns: dict[str, str] = {}
    """Our column name → the source's, for example `{prompt: question, completion: answer}`."""
    extra_columns: list[str] = []
    """Further columns of the source to keep, as text: for reward functions and for `training.curriculum`."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What one row of a text file is."""
    separator: str = "\n"
    """Put between prompt and completion, and counted as prompt."""
    eval_fraction: Fraction = 0.1
    """Share of rows held out. A row's side depends on its content and `seed` alone."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest sequence in tokens; longer ones are cut at the end and counted."""
    packing: bool | Literal["best-fit"] = False
    """Fill sequences of `max_length` with rows: true joins them and cuts, for plain text; `best-fit` puts whole rows
    beside each other that do not see each other (flash attention makes it fast)."""
    completion_only_loss: bool = True
    """Leave the prompt out of the loss where a row has one."""
    assistant_only_loss: bool = False
    """Count only what the assistant says in the loss of a conversation."""
    max_samples: Positive | None = None
    """Use at most this many rows, taken from the start."""
    max_rejected: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may be unreadable before the run stops; they are kept with their reasons."""

    @field_validator("source", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in COLUMNS:
                raise ValueError(f"maps {name!r}, which is none of {', '.join(COLUMNS)} (ours on the left side)")
        return value
