"""The document of a run that a script of somebody's own trains, by `baton.attach`: there is no recipe."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from baton.components.shared.core.document import Document, Json, NamedDocument
from baton.components.shared.runs.formats import Made


class Script(Document):
    """The program that began the run."""

    path: str = ""
    """Empty where there is no file, as in a notebook."""
    sha256: str = ""


class Attached(NamedDocument):
    """What a script trains: part of what its checkpoints know each other by."""

    NAME: ClassVar[str] = "attached.json"

    name: str
    created: str
    facts: Json
    """What must stay the same, by section: `arguments`, `model`, `rows`, …"""
    chunks: Json = Field(default_factory=dict)
    """Where it is not the default, what the section `chunks` of a recipe says."""
    script: Script = Script()
    made: Made = Made()
    """What the run was begun with."""
