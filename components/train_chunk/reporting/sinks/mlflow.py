"""MLflow, by the process beside the chunk that talks to its server; see `shared.runs.mlflow.tracker`."""

from __future__ import annotations

from collections.abc import Mapping

from baton.components.shared.runs.mlflow.tracker import Tracker
from baton.components.train_chunk.reporting.sinks.base import Source


class TrackingRun:
    """Reports to the tracking run, and says of its model which checkpoint it is.

    Args:
        tracker: Sends it.
        source: The chunk.
    """

    def __init__(self, tracker: Tracker, source: Source) -> None:
        self._tracker, self._source = tracker, source

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queues the values of a step."""
        self._tracker.log(numbers, step)

    def close(self) -> None:
        """Sends the rest."""
        if checkpoint := self._source.newest():
            self._tracker.tag_model({"baton.step": str(checkpoint.step), "baton.digest": checkpoint.digest})
        self._tracker.close()


def open_sink(source: Source) -> TrackingRun:
    """Returns the tracking run's queue, which drops what it gets where the recipe turns tracking off."""
    tracker = Tracker(source.run, recipe=source.recipe, trains=True, params=source.found_out)
    return TrackingRun(tracker, source)
