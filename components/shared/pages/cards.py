"""Cards: what stands in Kubeflow for something that lies in the store.

Kubeflow shows the first lines of an artifact that is one file and the metadata of any, and wants each under its own
root. So an artifact of Baton's is a small text, and metadata with the address of the real thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Fact: TypeAlias = str | int | float | bool


class Artifact(Protocol):
    """An output artifact, as kfp gives it to a stage."""

    metadata: dict[str, object]

    @property
    def path(self) -> str:
        """Where its file is written."""


@dataclass(frozen=True)
class Card:
    """A text for people, and facts for who takes the artifact as input."""

    text: str
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def leave(self, artifact: Artifact) -> None:
        """Writes the card as an output artifact of a stage."""
        with open(artifact.path, "w", encoding="utf-8") as file:
            file.write(self.text)
        artifact.metadata.update(self.facts)
