"""A run whose chunks are trained in the test's own process: the attempt of `training.py` on a tiny model."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from baton import events
from baton.checkpoint.staging import Staging
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.recipe.recipe import Recipe
from baton.recipe.run import Preemption
from baton.runs.plan import make_plan
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train import attempt, inputs
from baton.train.attempt import SaveAndStop
from baton.train.checkpointer import Checkpointer
from baton.train.context import Clock, TrainContext
from baton.train.distributed import Ranks
from baton.train.preemption import PreemptionWatch
from baton.train.score import Scoring
from tests.support import tiny, without

ROWS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in tiny.PAIRS]


COMPILER = "TORCHINDUCTOR_DETERMINISTIC"


@contextmanager
def as_before() -> Iterator[None]:
    """Puts back what an attempt sets for the whole process."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    compiler, inductor = os.environ.get(COMPILER), sys.modules.get("torch._inductor.config")
    crc, precision = torch.serialization.get_crc32_options(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        torch.serialization.set_crc32_options(crc)
        torch.set_float32_matmul_precision(precision)
        os.environ[COMPILER] = compiler or "0"
        if inductor:
            inductor.deterministic = compiler == "1"  # type: ignore[attr-defined]


@contextmanager
def events_in(told: list[events.Event]) -> Iterator[None]:
    """Collects events, in place of emitting them."""
    emit, events.emit = events.emit, told.append
    try:
        yield
    finally:
        events.emit = emit


class Chunks:
    """A run, and what its chunks do.

    Args:
        recipe: Its recipe.
        folder: Where its store lies.
        name: Its name.
        targets: Where chunks end; at the run's end alone where left out.
        callbacks: Of each trainer.
        store: Address of its store; a folder of its own where left out.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        name: str,
        targets: Sequence[int] = (),
        callbacks: Sequence[Any] = (),
        store: str | None = None,
    ) -> None:
        self.recipe = recipe
        self.folder = folder / f"{name}-local"
        self.folder.mkdir()
        self.run = Run(Storage(store or str(folder / "store")), name)
        self.run.create(recipe)
        for document in ("data.json", "model.json"):
            self.run.put(document, {})
        self.rows = tiny.tokens(recipe, ROWS)
        self.run.put("tokens.json", {"prefix": "", "train": len(self.rows), "tokens": 40 * len(self.rows)})
        plan = make_plan(recipe, len(self.rows))
        self.plan = plan.model_copy(update={"targets": tuple(targets) or plan.targets})
        self.store = CheckpointStore(self.run)
        self.callbacks = callbacks
        self.trainer: Any = None

    @property
    def save(self) -> SaveAndStop:
        """The callback that saves, of the chunk that trains or was trained last."""
        return next(each for each in self.trainer.callback_handler.callbacks if isinstance(each, SaveAndStop))

    @property
    def checkpointer(self) -> Checkpointer:
        """Takes its checkpoints."""
        return self.save._checkpointer

    def context(self, index: int, **values: Any) -> TrainContext:
        """Returns a chunk."""
        context = TrainContext(
            run=self.run,
            recipe=self.recipe,
            plan=self.plan,
            store=self.store,
            index=index,
            target=self.plan.target(index),
            identity="made of this",
            ranks=Ranks(),
            clock=Clock(),
        )
        return dataclasses.replace(context, **values)

    def train(
        self,
        index: int,
        *,
        leave_out: tuple[str, ...] = (),
        preemption: Preemption | None = None,
        callbacks: Sequence[Any] | None = None,
        scores: bool = False,
        **values: Any,
    ) -> Any:
        """Trains a chunk, `scores` it as a sweep's trial, and returns what committed its checkpoints."""
        context = self.context(index, **values)
        scoring = Scoring.of(self.run, index, context.clock) if scores else None
        without.install()
        with (
            as_before(),
            PreemptionWatch(preemption or Preemption(), interval=0.01) as watch,
            Staging() as staging,
        ):
            restorer = inputs.open_restorer(context, staging, None)
            fetched = restorer.require_no_code(restorer.fetch(to_score=scores))
            restored = inputs.without(fetched, leave_out, staging.folder(0))

            def build() -> tuple[TrainContext, Any]:
                evaluates = scores or context.recipe.evaluation.in_training
                held_out = self.rows.select(range(5)) if evaluates else None
                self.trainer = tiny.trainer(context.recipe, self.rows, self.folder, held_out)
                for callback in self.callbacks if callbacks is None else callbacks:
                    self.trainer.add_callback(callback())
                return context, self.trainer

            skipped = restorer.skipped
            return attempt.train_chunk(context, restored, skipped, staging, watch, build, scoring=scoring).committer

    def train_all(self, **options: Any) -> None:
        """Trains all chunks."""
        for index in range(1, len(self.plan.targets) + 1):
            self.train(index, **options)

    def at(self, step: int | None = None) -> Checkpoint:
        """Returns the checkpoint of a step, by default the last one."""
        checkpoint = self.store.read(step or self.plan.num_steps)
        assert checkpoint is not None
        return checkpoint

    @property
    def steps(self) -> list[int]:
        """The steps that are committed, ascending."""
        return sorted(checkpoint.step for checkpoint in self.store.committed())

    def logged(self) -> list[dict[str, float]]:
        """Returns what was logged and does not depend on the clock."""
        from baton.train.state import values_logged

        return values_logged(self.store.history(self.at()))
