"""Observers of training on the first rank."""

from __future__ import annotations

from collections.abc import Callable

from baton.checkpoint.store import Checkpoint
from baton.models.loading import count_parameters
from baton.runs.documents import TokenizedRows
from baton.tracking import tracker
from baton.train.context import TrainContext
from baton.train.metrics import sinks
from baton.train.metrics.live import LiveReport, Meter
from baton.train.metrics.sinks import Source
from baton.train.protocol import ChunkTrainer


def attach_observers(
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
        live: Returns how far the chunk is, by the names in `sinks.LIVE_GAUGES`.
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
    report = LiveReport(Meter(context.run, context.recipe, context.ranks.size), sinks.open_sinks(source))
    trainer.add_callback(report)
    if context.recipe.evaluation.write_every:
        from baton.train.metrics.samples import SampleCallback

        alive = trainer.watchdog.alive
        trainer.add_callback(SampleCallback(context.run, context.recipe, trainer.processing_class, report, alive))
    return report


def _found_out(context: TrainContext, trainer: ChunkTrainer) -> tracker.Parameters:
    """Returns the parameters of a run that a chunk has found out."""
    weights = list(trainer.model.parameters())
    return tracker.resolved_params(
        context.recipe,
        context.plan,
        context.run.need(TokenizedRows),
        world_size=context.ranks.size,
        parameters=count_parameters(weights),
        trainable=count_parameters(weight for weight in weights if weight.requires_grad),
    )
