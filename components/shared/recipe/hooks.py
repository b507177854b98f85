"""The user's own code, and consent to run somebody else's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from baton.components.shared.recipe.base import Section

OBJECT = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""`module:object`."""


def short(key: str) -> BeforeValidator:
    """Returns a validator that takes a plain string for a section with that one field set."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class Hook(Section):
    """An object by its import path, with keyword arguments to make it."""

    use: Annotated[str, Field(pattern=OBJECT)]
    """`module:object`, found in the image or in `hooks.source`."""
    options: dict[str, Any] = {}
    """Keyword arguments."""


class Hooks(Section):
    """The user's own code, from the image or from `source`, which travels with the run."""

    source: str | None = None
    """A Python file or a folder of them, here or `s3://…`; its content is part of the run's identity."""
    callbacks: list[Annotated[Hook, short("use")]] = []
    """Classes of `TrainerCallback`, made with their options. One with `state_dict` and `load_state_dict` is kept across
    chunks, as are plain values and arrays of any hook."""
    collator: Annotated[Hook, short("use")] | None = None
    """Called with `tokenizer` and its options, returns what joins rows to a batch. Random numbers it draws are seeded
    for each batch, so that they do not depend on where chunks end."""
    loss: Annotated[Hook, short("use")] | None = None
    """Called with `outputs`, `labels`, `num_items_in_batch` and its options, returns the loss; for `sft` and
    `pretrain`."""
    metrics: list[Annotated[Hook, short("use")]] = []
    """Called with the `EvalPrediction` of an evaluation and its options, return a mapping of names to numbers."""
    trainer: Annotated[str, Field(pattern=OBJECT)] | None = None
    """A class to put in front of the method's own trainer: its methods come first and may call `super()`."""

    @field_validator("source")
    @classmethod
    def _is_code(cls, value: str | None) -> str | None:
        if value is not None and re.search(r"\.(zip|whl|egg|tar|gz)$", value):
            raise ValueError(f"is {value!r}; expected a Python file or a folder of them")
        return value


ASK = "ask"
"""Of a recipe that somebody else has written: its code waits for consent."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Trust = Literal["ask"] | list[Sha256] | None
"""`ask`, or the digests of the files that somebody has consented to; None for a recipe of one's own."""

_CODE = re.compile(r"(^|\.)hooks\..+|\.trust_remote_code(\.\d+)?$|\.tasks\.include_path(\.\d+)?$|^resources\.env\.")
"""Settings that are code or name some: the user's functions and files, code that comes with a model, tasks of the
evaluation harness, which may call functions, and variables, which may be those of an interpreter."""
_MAY_BE_CODE = re.compile(r"(^|\.)use$|(^|\.)(rewards|functions)(\.\d+)+$")
"""Settings that name a function: one of Baton's, or `module:object`."""


def leaves(node: object, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a document that hold no others, each with its dotted path."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if children is None:
        yield place, node
    for key, value in children or ():
        yield from leaves(value, f"{place}.{key}".lstrip("."))


def code_in(document: Mapping[str, Any]) -> list[str]:
    """Returns the settings of a recipe that run code of somebody's, each as `path: value`.

    Args:
        document: The recipe as plain values; what its phases say and what its sweep tries counts as well.
    """
    return [f"{path}: {value}" for path, value in leaves(document) if value and _is_code(path, value)]


def _is_code(path: str, value: object) -> bool:
    return bool(_CODE.search(path) or (_MAY_BE_CODE.search(path) and ":" in str(value)))
