"""Cards: what Kubeflow shows for something that lies in the store.

Kubeflow wants each artifact under its own root, previews one that is a single file (255 bytes of it, 20 lines) and
shows the metadata of any. So an artifact of Baton's is a small text that begins with what matters most, and metadata
with the address of the real thing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Fact: TypeAlias = str | int | float | bool

DISPLAY_NAME = "display_name"
"""Metadata that Kubeflow's list of artifacts shows as their names; those of all runs stand there together."""
LARGEST = 60_000
"""Bytes of a card's text, at most."""


class Artifact(Protocol):
    """An output artifact, as kfp gives it to a stage."""

    metadata: dict[str, object]

    @property
    def path(self) -> str:
        """Where its file is written."""


@dataclass(frozen=True)
class Card:
    """A text for people, and facts for who takes the artifact as input.

    A fact that is None is left out, as Kubeflow's metadata store has no such value.
    """

    text: str
    facts: Mapping[str, Fact | None] = field(default_factory=dict)

    def write(self, artifact: Artifact) -> None:
        """Writes the card as an output artifact of a stage."""
        data = self.text.encode("utf-8", "backslashreplace")  # lone surrogates, which JSON may hold, have no bytes
        if len(data) > LARGEST:
            data = data[:LARGEST].decode("utf-8", "ignore").encode() + "\n…\n".encode()
        with open(artifact.path, "wb") as file:
            file.write(data)
        self.write_metadata(artifact)

    def write_metadata(self, artifact: Artifact) -> None:
        """Writes the facts alone, for an artifact that has no file or other ones; a number that is not finite becomes a
        word, as JSON has none."""
        for name, fact in self.facts.items():
            if fact is not None:
                is_finite = not isinstance(fact, float) or math.isfinite(fact)
                artifact.metadata[name] = fact if is_finite else str(fact)


def visible(text: str, length: int) -> str:
    """Returns the beginning of any text as one line: what does not print is escaped, and what is left out counted."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:length])
    rest = len(text) - length
    return shown if rest <= 0 else f"{shown}… ({rest:,} more)"


def table(lines: Mapping[str, str | None]) -> str:
    """Returns names and values as lines, the values below each other; without those that are not known."""
    known = {name: value for name, value in lines.items() if value}
    width = max(map(len, known), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in known.items())
