"""A trainer made to resume and to save: its resumption, its checkpoint manager and callback, and who looks on."""

from __future__ import annotations

from dataclasses import dataclass

from baton.components.shared.store.cache import NodeCache
from baton.components.train_chunk.checkpointing import resuming
from baton.components.train_chunk.checkpointing.callback import CheckpointCallback, Schedule
from baton.components.train_chunk.checkpointing.collective import CollectiveCheckpointManager, Services
from baton.components.train_chunk.checkpointing.lineage import Lineage
from baton.components.train_chunk.checkpointing.manager import CheckpointManager
from baton.components.train_chunk.checkpointing.pace import Pace
from baton.components.train_chunk.checkpointing.restore import Restored
from baton.components.train_chunk.reporting import observers
from baton.components.train_chunk.reporting.accounting import Accounting
from baton.components.train_chunk.reporting.cadence import EvaluationsPerEpoch
from baton.components.train_chunk.reporting.live import LiveReport
from baton.components.train_chunk.trainer.base import ChunkTrainer


@dataclass(frozen=True)
class Assembly:
    """The callbacks and services that are attached to a trainer.

    Attributes:
        callback: Decides when to save and to stop.
        manager: Takes what is saved.
        lead: The same in the first rank, where it commits; None in all others.
        report: Sends metrics, in the first rank.
    """

    callback: CheckpointCallback
    manager: CollectiveCheckpointManager
    lead: CheckpointManager | None
    report: LiveReport | None

    def close(self) -> None:
        """Ends what runs beside training."""
        self.manager.close()
        if self.report:
            self.report.close()


def attach(
    trainer: ChunkTrainer,
    services: Services,
    restored: Restored | None,
    *,
    level: str,
    skipped: list[str],
    leave_out: tuple[str, ...],
    reports: bool = True,
) -> Assembly:
    """Makes a trainer resume, save and report.

    Args:
        trainer: The trainer.
        services: What this rank works with.
        restored: The checkpoint to resume from.
        level: How exactly it does; see `compatibility.adapt`.
        skipped: Why newer checkpoints were passed over.
        leave_out: Parts of the state not to restore.
        reports: Whether metrics go where the recipe says.
    """
    context, recipe = services.context, services.context.recipe
    trainer.ranks, trainer.watchdog, trainer.guard = context.ranks, services.watchdog, recipe.training.guard
    trainer.resumption = resuming.resumption(restored, context, leave_out)
    if recipe.evaluation.per_epoch:
        trainer.add_callback(EvaluationsPerEpoch(context.plan, recipe.evaluation.per_epoch))
    lead: CheckpointManager | None = None
    report: LiveReport | None = None
    if context.ranks.is_first:
        lineage = Lineage(context, restored, level, skipped)
        accounting = Accounting.of(context, restored.meta.work if restored else None, lineage.start_step)
        cache = NodeCache.of(recipe.store)
        lead = CheckpointManager(services, trainer, restored, lineage=lineage, accounting=accounting, cache=cache)
        # Before the checkpoint callback: what these do at a step's end is over when its checkpoint is captured.
        if reports:
            folder, newest = services.staging.folder(0), lambda: lineage.parent
            report = observers.attach(context, trainer, folder, lead.live, newest=newest)
    manager = lead or CollectiveCheckpointManager(services)
    schedule = Schedule(
        target=context.target,
        plan=context.plan,
        every_steps=recipe.chunks.every_steps,
        per_epoch=recipe.chunks.checkpoints_per_epoch,
        every_seconds=recipe.chunks.every_seconds,
        pace=Pace() if recipe.chunks.is_continuous else None,
        keep_best=recipe.export.checkpoint == "best",
    )
    callback = CheckpointCallback(trainer, schedule, manager, replicated=not recipe.parallel.is_sharded)
    return Assembly(callback, manager, lead, report)
