"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.components.shared.recipe import extras
from baton.components.shared.runs.run import Run
from baton.components.train_chunk.reporting.sinks.base import Source, keep

if TYPE_CHECKING:
    import wandb


class Project:
    """Reports to a run of a project.

    Args:
        tracked: The run there, which the chunks of a training run share.
        run: The training run, below which its folder is put where it has no network.
    """

    def __init__(self, tracked: wandb.Run, run: Run) -> None:
        self._tracked, self._run = tracked, run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queues the values of a step."""
        self._tracked.log(dict(numbers), step=step)

    def close(self) -> None:
        """Sends the rest."""
        self._tracked.finish()
        if self._tracked.offline:  # `wandb sync` sends it later; this machine's folder ends with the chunk
            import wandb

            wandb.teardown()  # until then its own process may hold the last records back
            folder = os.path.dirname(self._tracked.dir)
            keep(self._run, folder, f"wandb/{os.path.basename(folder)}")


def open_sink(source: Source) -> Project | None:
    """Returns the run of the recipe's project, None where it names none.

    Raises:
        UserError: the package is not installed.
    """
    project = source.recipe.tracking.wandb
    if project is None:
        return None
    extras.require("tracking.wandb", "wandb")
    import wandb

    name = source.run.name
    tracked = wandb.init(project=project, id=name, name=name, resume="allow", dir=source.folder)
    return Project(tracked, source.run)
