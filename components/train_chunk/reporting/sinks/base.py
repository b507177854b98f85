"""What a sink is: where a chunk's metrics go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from components.shared.recipe import Recipe
from components.shared.runs import Run


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is measured.

    Attributes:
        run: The training run.
        recipe: Its recipe.
        index: Number of the chunk.
        folder: A local folder for files.
        live: Returns how far the chunk is, by the names in `prometheus.LIVE`.
        seconds: Returns the seconds of the chunk by phase.
    """

    run: Run
    recipe: Recipe
    index: int
    folder: str
    live: Callable[[], dict[str, float]]
    seconds: Callable[[], dict[str, float]]


class Sink(Protocol):
    """Takes the metrics of a chunk; steps run on across chunks."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Takes the values of a step, without keeping training waiting."""

    def close(self) -> None:
        """Sends the rest."""
