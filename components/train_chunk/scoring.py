"""The score of a sweep's trial behind each chunk: the held-out rows evaluated once the checkpoint is committed.

An evaluation draws random numbers, so it comes behind the commit: the next chunk restores what the checkpoint has, and
the run ends on the bits that its recipe gives without a sweep.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from components.shared import code, events
from components.shared.bundles import Manifest
from components.shared.errors import UserError
from components.shared.runs import Run, now
from components.shared.sweeps import TRIAL, Sweep, score_name

if TYPE_CHECKING:
    from components.train_chunk.chunk import Chunk

TIMED = ("_runtime", "_per_second")
"""How names of figures end that depend on the clock."""


class Scoring:
    """Scores of one trial.

    Args:
        run: Its run.
        trial: What the run knows of its sweep.
    """

    def __init__(self, run: Run, trial: dict[str, Any]) -> None:
        self._run, self._trial = run, trial
        self._sweep = Sweep(run.storage, trial["sweep"])

    @classmethod
    def of(cls, run: Run) -> Scoring | None:
        """Returns the scoring of a run, None where it is no trial."""
        trial = run.get(TRIAL)
        return cls(run, trial) if trial else None

    def is_stopped(self) -> bool:
        """Tells whether somebody has asked for the end of this trial."""
        wish = self._sweep.control(self._trial["id"])
        return wish is not None and wish["state"] == "stop"

    def is_kept(self, index: int) -> bool:
        """Tells whether there is a score behind a chunk."""
        return self._run.get(score_name(index)) is not None

    def keep(self, chunk: Chunk, trainer: Any, step: int) -> None:
        """Evaluates what a trainer has in memory and keeps the score; every process of a chunk takes part.

        Raises:
            UserError: the evaluation does not give the sweep's metric.
        """
        chunk.clock.enter("score", step=step)
        found: dict[str, float] = trainer.evaluate()
        if not trainer.is_world_process_zero():
            return
        metrics = {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and not name.endswith(TIMED) and name != "epoch"
        }
        name = next((x for x in (self._trial["metric"], f"eval_{self._trial['metric']}") if x in metrics), None)
        if name is None:
            raise UserError(
                f"sweep.metric is {self._trial['metric']!r}, which the evaluation of the held-out rows does not give.",
                remedy=f"It gives {', '.join(sorted(metrics))}.",
            )
        self._put(chunk, step, metrics[name], metrics)

    def again(self, chunk: Chunk, step: int, manifest: Manifest) -> None:
        """Scores a chunk whose checkpoint is committed and that has no score; it trains nothing."""
        before = [score for score in self._sweep.scores(self._run) if score["step"] == step]
        if before:  # early stopping has ended the run there
            self._put(chunk, step, before[0]["value"], before[0]["metrics"])
            return
        from components.train_chunk import arguments, methods

        tokens = chunk.tokens.fetch(max(step - 1, 0), step)
        code.install(code.fetch(self._run, chunk.staging.folder(0)))
        arguments.make_deterministic(manifest.meta["fingerprint"]["threads"], chunk.recipe.training.deterministic)
        folder = os.path.join(chunk.staging.folder(manifest.bytes), f"scored-{step}")
        folder = chunk.store.fetch(step, manifest, folder, chunk.cache)
        base = chunk.base()
        method = methods.load(chunk.recipe.training.method)
        trainer: Any = method.build(chunk.setup(tokens, base, start_weights=chunk.recipe.adapter is not None))
        trainer._load_from_checkpoint(folder)
        self.keep(chunk, trainer, step)

    def _put(self, chunk: Chunk, step: int, value: float | None, metrics: Mapping[str, float | None]) -> None:
        document = {
            "chunk": chunk.index,
            "step": step,
            "value": _number(value),
            "metrics": {name: _number(each) for name, each in metrics.items()},
            "seconds": chunk.clock.total(),
            "at": now(),
        }
        self._run.put(score_name(chunk.index), document)
        events.emit("scored", trial=self._trial["id"], chunk=chunk.index, step=step, value=document["value"])


def _number(value: float | None) -> float | None:
    """Returns a number, None for one that is not finite: JSON has none of those."""
    return value if value is not None and math.isfinite(value) else None
