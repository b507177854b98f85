"""TensorBoard's event files, uploaded to `tensorboard/` below the run when the chunk ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from baton.components.shared.recipe import extras
from baton.components.shared.runs.run import Run
from baton.components.train_chunk.reporting.sinks.base import Source, keep

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class EventFiles:
    """Writes a chunk's event files.

    Args:
        writer: Writes them.
        folder: Where it does.
        run: Below which they end.
    """

    def __init__(self, writer: SummaryWriter, folder: str, run: Run) -> None:
        self._writer, self._folder, self._run = writer, folder, run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Writes the values of a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name.replace("eval_", "eval/", 1), value, step)

    def close(self) -> None:
        """Uploads the files."""
        self._writer.close()
        keep(self._run, self._folder, "tensorboard")


def open_sink(source: Source) -> EventFiles | None:
    """Returns the event files of a chunk, None where the recipe wants none.

    Raises:
        UserError: TensorBoard is not installed.
    """
    if not source.recipe.tracking.tensorboard:
        return None
    extras.require("tracking.tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folder = os.path.join(source.folder, "tensorboard")
    return EventFiles(SummaryWriter(folder), folder, source.run)
