"""Kubeflow's view of a chunk's checkpoint: a card. The chunk's page is the run's, as far as it has come."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TypeAlias

from baton.checkpoint.store import Checkpoint, CheckpointStore, LogEntry
from baton.errors import BatonError
from baton.pages.card import DISPLAY_NAME, Card, Fact
from baton.runs.documents import ChunkRecord
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.train.chunk import Outcome

logger = logging.getLogger("baton")

Points: TypeAlias = list[tuple[int, float]]


@dataclass(frozen=True)
class Shown:
    run: Run
    index: int
    outcome: Outcome
    plan: Plan
    checkpoint: Checkpoint | None
    log: list[LogEntry]
    attempt: ChunkRecord | None  # the last one that trained

    @classmethod
    def of(cls, run_uri: str, index: int, outcome: Outcome) -> Shown:
        run = Run.open(run_uri)
        store, plan = CheckpointStore(run), run.plan()
        try:
            checkpoint = store.read(outcome.step) if outcome.digest else None
            trained = [attempt for attempt in run.attempts(index) if attempt.to_step > attempt.from_step]
            log = store.history(checkpoint) if checkpoint else []
        except BatonError as error:
            # Shown without them, as the chunk itself is done.
            logger.warning("the card of chunk %d lacks its figures: %s", index, error)
            return cls(run, index, outcome, plan, None, [], None)
        return cls(run, index, outcome, plan, checkpoint, log, trained[-1] if trained else None)

    def series(self, key: str) -> Points:
        entries = ((int(entry["step"]), entry.get(key)) for entry in self.log)
        return [(step, value) for step, value in entries if value is not None and math.isfinite(value)]

    @property
    def tokens_per_second(self) -> float | None:
        attempt = self.attempt
        if attempt is None or not attempt.seconds.get("train") or not attempt.tokens:
            return None
        steps = attempt.to_step - attempt.from_step
        return steps * attempt.tokens / self.plan.steps_per_epoch / attempt.seconds["train"]


def checkpoint_card(shown: Shown) -> Card:
    outcome = shown.outcome
    if shown.checkpoint is None:
        return Card(f"Chunk {shown.index}: {outcome.ending.value}; its checkpoint is not known here.\n")
    work = shown.checkpoint.meta.work
    values: dict[str, Fact | None] = {
        "step": outcome.step,
        "steps": shown.plan.num_steps,
        "loss": _last(shown.series("loss")),
        "eval_loss": _last(shown.series("eval_loss")),
        "tokens_per_second": shown.tokens_per_second,
        "goodput": work.goodput,
        "skipped": ", ".join(map(str, shown.checkpoint.meta.skips)) or None,
        "digest": outcome.digest,
        "address": outcome.uri,
    }
    facts = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }
    lines = [f"Checkpoint of {shown.run.name} after chunk {shown.index}: {outcome.ending.value}", ""]
    lines += [f"{name:18} {value}" for name, value in facts.items()]
    lines += ["", f"AutoModelForCausalLM.from_pretrained or Trainer's resume_from_checkpoint read {outcome.uri}"]
    return Card("\n".join(lines) + "\n", {**facts, DISPLAY_NAME: f"{shown.run.name} · step {outcome.step}"})


def _last(points: Points) -> float | None:
    return points[-1][1] if points else None
