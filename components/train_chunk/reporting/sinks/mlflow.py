"""MLflow, by the process beside the chunk that talks to its server; see `baton.components.shared.runs.tracking`."""

from __future__ import annotations

from baton.components.shared.runs.tracking import Tracker
from baton.components.train_chunk.reporting.sinks.base import Source


def open_sink(source: Source) -> Tracker:
    """Returns the tracking run's queue, which drops what it gets where the recipe turns tracking off."""
    return Tracker(source.run, system_metrics=True)
