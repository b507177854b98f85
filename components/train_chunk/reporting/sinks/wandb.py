"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.shared.errors import UserError
from components.train_chunk.reporting.sinks.base import Source

if TYPE_CHECKING:
    import wandb


class Project:
    """Reports to a run of a project.

    Args:
        tracked: The run there, which the chunks of a training run share.
    """

    def __init__(self, tracked: wandb.Run) -> None:
        self._tracked = tracked

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queues the values of a step."""
        self._tracked.log(dict(numbers), step=step)

    def close(self) -> None:
        """Sends the rest."""
        self._tracked.finish()


def open_sink(source: Source) -> Project | None:
    """Returns the run of the recipe's project, None where it names none.

    Raises:
        UserError: the package is not installed.
    """
    project = source.recipe.tracking.wandb
    if project is None:
        return None
    try:
        import wandb
    except ImportError:
        raise UserError("tracking.wandb: the package wandb is not installed.", remedy="Add it to the image.") from None
    name = source.run.name
    return Project(wandb.init(project=project, id=name, name=name, resume="allow", dir=source.folder))
