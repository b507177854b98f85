"""Several trainings one after the other, each starting from the model of the one before."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from baton.components.shared.recipe.base import Section

PREVIOUS = "previous-phase"
"""Stands for the model that the phase before exports, until that is known."""

MERGED = ("data", "adapter", "training", "chunks", "evaluation", "hooks")
"""Sections in which a phase may differ."""


class Phase(Section):
    """One training of several: what it has in a section stands in place of the top level's, key by key."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$")]
    """Its name, of lower-case letters, digits and dashes; its run is called `<run>-<name>`."""
    data: dict[str, Any] = {}
    """As `data` at the top level."""
    adapter: dict[str, Any] | None = {}
    """As `adapter` at the top level; null trains the full weights."""
    training: dict[str, Any] = {}
    """As `training` at the top level."""
    chunks: dict[str, Any] = {}
    """As `chunks` at the top level."""
    evaluation: dict[str, Any] = {}
    """As `evaluation` at the top level."""
    hooks: dict[str, Any] = {}
    """As `hooks` at the top level."""


def _short(value: Any) -> Any:
    return {"name": value, "training": {"method": value}} if isinstance(value, str) else value


ShortPhase = Annotated[Phase, BeforeValidator(_short, json_schema_input_type=Phase | str)]
"""A phase, or just the name of its method."""


def merged(document: dict[str, Any], phase: Phase, position: int, *, last: bool) -> dict[str, Any]:
    """Returns the recipe of a phase as plain values.

    Args:
        document: The whole recipe, resolved.
        phase: The phase.
        position: Its number, from 0; those after the first start from the model of the one before.
        last: Whether it is the last; the others hand on a whole model.
    """
    recipe = {**document, "phases": [], "name": f"{document['name'][:42]}-{phase.name}"}
    for section in MERGED:
        own = getattr(phase, section)
        recipe[section] = None if own is None else {**(document[section] or {}), **own} or None
    if position:
        recipe["model"] = {**document["model"], "base": PREVIOUS, "from_scratch": None, "tokenizer": None}
    if not last:
        recipe["export"] = {**document["export"], "formats": ["safetensors"], "hub": None, "registered_model": None}
        recipe["evaluation"] = {**recipe["evaluation"], "gate": {}}
    return recipe
