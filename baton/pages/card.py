"""Cards: Kubeflow's view of an object in the store.

Kubeflow wants each artifact under its own root, previews a single file (255 bytes, 20 lines) and shows any metadata. So
an artifact is a small text with the main facts first, and metadata with the real object's address.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Fact: TypeAlias = str | int | float | bool

DISPLAY_NAME = "display_name"  # metadata key of the name in Kubeflow's list, which mixes the artifacts of all runs
LARGEST = 60_000  # bytes of a card's text, at most


class Artifact(Protocol):
    metadata: dict[str, object]

    @property
    def path(self) -> str:
        """Path of its file."""


@dataclass(frozen=True)
class Card:
    """A text for people, and facts for programs; None is left out, as Kubeflow's metadata has no such value."""

    text: str
    facts: Mapping[str, Fact | None] = field(default_factory=dict)

    def write(self, artifact: Artifact) -> None:
        data = self.text.encode("utf-8", "backslashreplace")  # lone surrogates, which JSON may hold, have no bytes
        if len(data) > LARGEST:
            data = data[:LARGEST].decode("utf-8", "ignore").encode() + "\n…\n".encode()
        with open(artifact.path, "wb") as file:
            file.write(data)
        self.write_metadata(artifact)

    def write_metadata(self, artifact: Artifact) -> None:
        """Writes the facts alone; a number that is not finite becomes a word, as JSON has none."""
        for name, fact in self.facts.items():
            if fact is not None:
                is_finite = not isinstance(fact, float) or math.isfinite(fact)
                artifact.metadata[name] = fact if is_finite else str(fact)


def visible(text: str, length: int) -> str:
    """Returns the beginning of a text as one line, unprintable characters escaped and the rest counted."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:length])
    rest = len(text) - length
    return shown if rest <= 0 else f"{shown}… ({rest:,} more)"


def table(lines: Mapping[str, str | None]) -> str:
    """Returns names and known values as aligned lines."""
    known = {name: value for name, value in lines.items() if value}
    width = max(map(len, known), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in known.items())
