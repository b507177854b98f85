"""MLflow, by the process beside the chunk that talks to its server; see `components.shared.tracking`."""

from __future__ import annotations

from components.shared.tracking import Tracker
from components.train_chunk.reporting.sinks.base import Source


def open_sink(source: Source) -> Tracker:
    """Returns the tracking run's queue, which drops what it gets where the recipe turns tracking off."""
    return Tracker(source.run, system_metrics=True)
