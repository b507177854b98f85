"""Metric sinks, a module for each: it opens itself where the recipe asks for it."""

from __future__ import annotations

from baton.components.train_chunk.reporting.sinks import jsonl, mlflow, prometheus, tensorboard, wandb
from baton.components.train_chunk.reporting.sinks.base import Sink, Source

SINKS = (prometheus, mlflow, wandb, tensorboard, jsonl)


def open_all(source: Source) -> list[Sink]:
    """Returns the sinks that a recipe asks for.

    Raises:
        UserError: the package of one of them is not installed.
    """
    return [sink for module in SINKS if (sink := module.open_sink(source))]
