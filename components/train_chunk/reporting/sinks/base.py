"""The protocol of a sink, to which a chunk's metrics go."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.components.shared.checkpoints.store import Checkpoint
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.run import Run

logger = logging.getLogger("baton")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The chunk whose metrics are sent.

    Attributes:
        run: The training run.
        recipe: Its recipe.
        index: Number of the chunk.
        folder: A local folder for files.
        live: Returns how far the chunk is, by the names in `prometheus.LIVE`.
        seconds: Returns the seconds of the chunk by phase.
        newest: Returns the newest checkpoint, None before there is one.
        found_out: Parameters of the run that its recipe does not say, see `shared.runs.mlflow.parameters`.
    """

    run: Run
    recipe: Recipe
    index: int
    folder: str
    live: Callable[[], dict[str, float]]
    seconds: Callable[[], dict[str, float]]
    newest: Callable[[], Checkpoint | None] = lambda: None
    found_out: Mapping[str, str] = field(default_factory=dict)


def keep(run: Run, folder: str, name: str) -> None:
    """Uploads the files of a local folder, at any depth, to a name below the run; one that fails is left out."""
    for place, _, files in os.walk(folder):
        below = os.path.normpath(os.path.join(name, os.path.relpath(place, folder)))
        for file in files:
            try:
                run.storage.upload(os.path.join(place, file), run.path(f"{below}/{file}"))
            except Exception as error:  # a picture of the run, not the run
                logger.warning("%s of the metrics was not kept: %s", file, error)


class Sink(Protocol):
    """Takes the metrics of a chunk; steps run on across chunks."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Takes the values of a step, without keeping training waiting."""

    def close(self) -> None:
        """Sends the rest."""
