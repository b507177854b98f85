"""JSON Lines below the run: an object for each logged step, for those who read metrics with what they have."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.run import Run
from baton.components.train_chunk.reporting.sinks.base import Source

logger = logging.getLogger("baton")


class Lines:
    """Writes a chunk's metrics to a local file, which is uploaded when the chunk ends.

    Args:
        path: The local file.
        run: The run below which it ends.
        name: Its name there.
    """

    def __init__(self, path: str, run: Run, name: str) -> None:
        self._path, self._run, self._name = path, run, name
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the chunk

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Writes the values of a step."""
        self._file.write(json.dumps({"step": step, **numbers}) + "\n")

    def close(self) -> None:
        """Uploads the file."""
        self._file.close()
        try:
            self._run.storage.upload(self._path, self._run.path(self._name))
        except BatonError as error:  # a copy of what the checkpoint holds, not the run
            logger.warning("%s was not kept: %s", self._name, error)


def open_sink(source: Source) -> Lines | None:
    """Returns the file of a chunk's attempt, None where the recipe wants none."""
    if not source.recipe.tracking.jsonl:
        return None
    # Each attempt at a chunk has its own file: one that was killed and comes late overwrites nobody's.
    name = f"metrics/chunk-{source.index:03d}-{uuid.uuid4().hex[:6]}.jsonl"
    return Lines(os.path.join(source.folder, "metrics.jsonl"), source.run, name)
