"""Observers of training on the first rank."""

from __future__ import annotations

from collections.abc import Callable

from baton.components.shared.checkpoints.store import Checkpoint
from baton.components.shared.models.counting import count
from baton.components.shared.runs.documents.data import Tokens
from baton.components.shared.runs.mlflow import parameters
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.reporting import sinks
from baton.components.train_chunk.reporting.live import LiveReport, Meter
from baton.components.train_chunk.reporting.sinks.base import Source
from baton.components.train_chunk.trainer.base import ChunkTrainer


def attach(
    context: TrainContext,
    trainer: ChunkTrainer,
    folder: str,
    live: Callable[[], dict[str, float]],
    newest: Callable[[], Checkpoint | None],
) -> LiveReport:
    """Reports a trainer's metrics, and what its model generates where the recipe asks for it.

    Args:
        context: The chunk.
        trainer: Its trainer.
        folder: A local folder for event files.
        live: Returns how far the chunk is, by the names in `prometheus.LIVE`.
        newest: Returns the newest checkpoint, None before there is one.
    """
    source = Source(
        run=context.run,
        recipe=context.recipe,
        index=context.index,
        folder=folder,
        live=live,
        seconds=context.clock.split,
        newest=newest,
        found_out=_found_out(context, trainer),
    )
    report = LiveReport(Meter(context.run, context.recipe, context.ranks.size), sinks.open_all(source))
    trainer.add_callback(report)
    if context.recipe.evaluation.write_every:
        from baton.components.train_chunk.reporting.samples import SampleCallback

        alive = trainer.watchdog.alive
        trainer.add_callback(SampleCallback(context.run, context.recipe, trainer.processing_class, report, alive))
    return report


def _found_out(context: TrainContext, trainer: ChunkTrainer) -> parameters.Parameters:
    """Returns the parameters of a run that a chunk has found out."""
    weights = list(trainer.model.parameters())
    return parameters.resolved(
        context.recipe,
        context.plan,
        context.run.need(Tokens),
        world_size=context.ranks.size,
        parameters=count(weights),
        trainable=count(weight for weight in weights if weight.requires_grad),
    )
