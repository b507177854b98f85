"""Metric sinks, a module for each: it opens itself where the recipe asks for it."""

from __future__ import annotations

from baton.components.train_chunk.reporting.sinks.base import Sink, Source
from baton.components.train_chunk.reporting.sinks.jsonl import open_sink as open_jsonl
from baton.components.train_chunk.reporting.sinks.mlflow import open_sink as open_mlflow
from baton.components.train_chunk.reporting.sinks.prometheus import open_sink as open_prometheus
from baton.components.train_chunk.reporting.sinks.tensorboard import open_sink as open_tensorboard
from baton.components.train_chunk.reporting.sinks.wandb import open_sink as open_wandb

SINKS = (open_prometheus, open_mlflow, open_wandb, open_tensorboard, open_jsonl)


def open_all(source: Source) -> list[Sink]:
    """Returns the sinks that a recipe asks for.

    Raises:
        UserError: the package of one of them is not installed.
    """
    return [sink for open_sink in SINKS if (sink := open_sink(source))]
