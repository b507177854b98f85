"""The score of a sweep's trial after each chunk: the held-out rows evaluated once the last checkpoint is captured.

An evaluation draws random numbers, so it comes after that: the next chunk restores what the checkpoint has, and the
run ends on the bits that its recipe gives without a sweep. It is kept once the checkpoint is committed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton import events
from baton.errors import UserError
from baton.runs import outcomes
from baton.runs.documents import SplitData, StagePhase
from baton.runs.outcomes import TrialInfo
from baton.runs.run import Run, Sweep, now
from baton.train.context import Clock
from baton.train.protocol import ChunkTrainer, replaced

if TYPE_CHECKING:
    from transformers import TrainerState

TIMED = ("_runtime", "_per_second")  # ends of figures' names that depend on the clock


@dataclass(frozen=True)
class Score:
    """A trial's score: the sweep's metric at a step, None if not finite, and the whole evaluation."""

    step: int
    value: float | None
    metrics: dict[str, float | None]
    rows: outcomes.TrialRows | None = None


class Scoring:
    """The score of a trial after one chunk."""

    def __init__(self, run: Run, index: int, clock: Clock, trial: TrialInfo) -> None:
        self._run, self._index, self._clock = run, index, clock
        self._trial, self._metric, self._sweep = trial.id, trial.metric, Sweep(run.storage, trial.sweep)
        self._keeps_rows = trial.keeps_rows

    @classmethod
    def of(cls, run: Run, index: int, clock: Clock) -> Scoring | None:
        trial = run.read(TrialInfo)
        return cls(run, index, clock, trial) if trial else None

    def is_stopped(self) -> bool:
        request = self._sweep.request(self._trial)
        return request is not None and request.state == "stop"

    def is_kept(self, step: int) -> bool:
        """Tells whether the chunk, which ended at a step, has a score."""
        if self._run.read(outcomes.TrialScore, self._index) is not None:
            return True
        # After early stopping, the score of the chunk in which it ended the run counts for those that follow.
        before = next((score for score in self._sweep.scores(self._run) if score.step == step), None)
        if before:
            rows = self._run.read(outcomes.TrialRows, before.chunk)
            self.keep(Score(step, before.value, before.metrics, rows))
        return before is not None

    def measure(self, trainer: ChunkTrainer, step: int) -> Score | None:
        """Evaluates a trainer's model in memory; every rank takes part, and the first has the score."""
        self._clock.enter(StagePhase.SCORE, step=step)
        with self._by_row(trainer):
            values: dict[str, float] = trainer.evaluate()
        rows = trainer.evaluated_rows(self._metric) if self._keeps_rows else []
        if not trainer.is_world_process_zero():
            return None
        # JSON has no number that is not finite.
        metrics = {
            name: float(value) if math.isfinite(value) else None
            for name, value in values.items()
            if isinstance(value, int | float) and not name.endswith(TIMED) and name != "epoch"
        }
        name = next((x for x in (self._metric, f"eval_{self._metric}") if x in metrics), None)
        if name is None:
            raise UserError(
                f"sweep.metric is {self._metric!r}, which the evaluation of the held-out rows does not give.",
                remedy=f"It gives {', '.join(sorted(metrics))}.",
            )
        kept = None
        if rows:
            data = self._run.need(SplitData).digest
            kept = outcomes.TrialRows(values=[x for x, _ in rows], weights=[x for _, x in rows], data=data)
        return Score(step, metrics[name], metrics, kept)

    def _by_row(self, trainer: ChunkTrainer) -> contextlib.AbstractContextManager[None]:
        """Has an evaluation take each row by itself, where rows are kept and the trainer may."""
        recipe = trainer.recipe
        if not self._keeps_rows or recipe.training.spec.generates or recipe.parallel.virtual_workers:
            return contextlib.nullcontext()
        return replaced(trainer.args, per_device_eval_batch_size=1)

    def measure_again(
        self,
        trainer: ChunkTrainer,
        step: int,
        folder: str,
        *,
        restore: Callable[[TrainerState], None],
        prove: Callable[[], None],
    ) -> Score | None:
        """Scores a committed checkpoint without a score exactly as the process that made it would have.

        The trainer restores it as if to resume, with all ranks, shards and random state, and stops before its first
        step. `restore` brings the state that `Trainer` does not, and `prove` raises `ExactnessError` if the state
        differs.
        """
        from transformers import TrainerCallback

        scoring, scores = self, []

        class Left(Exception):  # noqa: N818
            """The score is taken."""

        class Scores(TrainerCallback):
            def on_train_begin(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
                restore(state)
                # `Trainer` does it only after this event, too late here; without it the evaluation would draw other
                # numbers.
                trainer._load_rng_state(folder)
                prove()
                scores.append(scoring.measure(trainer, step))
                raise Left

        trainer.add_callback(Scores())
        with contextlib.suppress(Left):
            trainer.train(resume_from_checkpoint=folder)
        return scores[0]

    def keep(self, score: Score) -> None:
        if score.rows:  # first: a score never lacks its rows
            self._run.write(score.rows, self._index)
        document = outcomes.TrialScore(
            chunk=self._index,
            step=score.step,
            value=score.value,
            metrics=score.metrics,
            seconds=self._clock.total(),
            at=now(),
        )
        self._run.write(document, self._index)
        events.emit(events.Scored(trial=self._trial, chunk=self._index, step=score.step, value=score.value))
