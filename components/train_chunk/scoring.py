"""The score of a sweep's trial behind each chunk: the held-out rows evaluated once the last checkpoint is taken.

An evaluation draws random numbers, so it comes behind that: the next chunk restores what the checkpoint has, and the
run ends on the bits that its recipe gives without a sweep. It is kept once the checkpoint is committed.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from components.shared import events
from components.shared.errors import UserError
from components.shared.run_documents.sweeps import Score as ScoreDocument
from components.shared.run_documents.sweeps import TrialNote
from components.shared.runs import Run, now
from components.shared.sweeps import Sweep

if TYPE_CHECKING:
    from components.train_chunk.chunk import Chunk
    from components.train_chunk.restoring import Restored

TIMED = ("_runtime", "_per_second")
"""How names of figures end that depend on the clock."""


@dataclass(frozen=True)
class Score:
    """How well a trial does.

    Attributes:
        step: At which step.
        value: The sweep's metric, None for one that is not finite.
        metrics: All that the evaluation gave.
    """

    step: int
    value: float | None
    metrics: dict[str, float | None]


class Scoring:
    """Scores of one trial.

    Args:
        run: Its run.
        trial: What the run knows of its sweep.
    """

    def __init__(self, run: Run, trial: TrialNote) -> None:
        self._run, self._trial = run, trial
        self._sweep = Sweep(run.storage, trial.sweep)

    @classmethod
    def of(cls, run: Run) -> Scoring | None:
        """Returns the scoring of a run, None where it is no trial."""
        trial = run.read(TrialNote)
        return cls(run, trial) if trial else None

    def is_stopped(self) -> bool:
        """Tells whether somebody has asked for the end of this trial."""
        wish = self._sweep.control(self._trial.id)
        return wish is not None and wish.state == "stop"

    def is_kept(self, chunk: Chunk, step: int) -> bool:
        """Tells whether there is a score behind a chunk that has come to a step.

        Where early stopping has ended the run, that of the chunk in which it did is the score of those behind it.
        """
        if self._run.read(ScoreDocument, chunk.index) is not None:
            return True
        before = next((score for score in self._sweep.scores(self._run) if score.step == step), None)
        if before:
            self.keep(chunk, Score(step, before.value, before.metrics))
        return before is not None

    def measure(self, chunk: Chunk, trainer: Any, step: int) -> Score | None:
        """Evaluates what a trainer has in memory; every process of a chunk takes part, and the first has the score.

        Raises:
            UserError: the evaluation does not give the sweep's metric.
        """
        chunk.clock.enter("score", step=step)
        found: dict[str, float] = trainer.evaluate()
        if not trainer.is_world_process_zero():
            return None
        metrics = {
            name: _number(value)
            for name, value in found.items()
            if isinstance(value, int | float) and not name.endswith(TIMED) and name != "epoch"
        }
        name = next((x for x in (self._trial.metric, f"eval_{self._trial.metric}") if x in metrics), None)
        if name is None:
            raise UserError(
                f"sweep.metric is {self._trial.metric!r}, which the evaluation of the held-out rows does not give.",
                remedy=f"It gives {', '.join(sorted(metrics))}.",
            )
        return Score(step, metrics[name], metrics)

    def again(self, chunk: Chunk, trainer: Any, restored: Restored) -> Score | None:
        """Scores a checkpoint that is committed and has no score, as the process would have that made it.

        The trainer restores it as if it went on, with all processes, shards and random state, and is left before its
        first step.
        """
        from transformers import TrainerCallback

        scoring, measured = self, []

        class Left(Exception):  # noqa: N818
            """There is the score."""

        class Scores(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                trainer._load_rng_state(restored.folder)
                measured.append(scoring.measure(chunk, trainer, restored.step))
                raise Left

        trainer.add_callback(Scores())
        with contextlib.suppress(Left):
            trainer.train(resume_from_checkpoint=restored.folder)
        return measured[0]

    def keep(self, chunk: Chunk, score: Score) -> None:
        """Writes the score behind a chunk, whose checkpoint is committed."""
        document = ScoreDocument(chunk=chunk.index, **asdict(score), seconds=chunk.clock.total(), at=now())
        self._run.write(document, chunk.index)
        events.emit("scored", trial=self._trial.id, chunk=chunk.index, step=score.step, value=score.value)


def _number(value: float) -> float | None:
    """Returns a number, None for one that is not finite: JSON has none of those."""
    return float(value) if math.isfinite(value) else None
