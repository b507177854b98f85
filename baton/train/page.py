"""Kubeflow's view of a chunk: a card for its checkpoint, and a page of the loss so far.

Drawn without matplotlib, whose import alone would delay the next chunk by a second.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from baton.checkpoint.store import Checkpoint, CheckpointStore, LogEntry
from baton.errors import BatonError
from baton.pages import html
from baton.pages.card import DISPLAY_NAME, Card, Fact
from baton.runs.documents import ChunkRecord, Skip
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.train.chunk import Outcome

logger = logging.getLogger("baton")

WIDTH, HEIGHT, MAX_POINTS = 1000, 260, 500
Points: TypeAlias = list[tuple[int, float]]

_pages = html.environment(Path(__file__).parent)


@dataclass(frozen=True)
class Shown:
    run: Run
    index: int
    outcome: Outcome
    plan: Plan
    checkpoint: Checkpoint | None
    log: list[LogEntry]
    attempt: ChunkRecord | None  # the last one that trained
    skips: Sequence[Skip] = ()

    @classmethod
    def of(cls, run_uri: str, index: int, outcome: Outcome) -> Shown:
        run = Run.open(run_uri)
        store, plan = CheckpointStore(run), run.plan()
        try:
            checkpoint = store.read(outcome.step) if outcome.digest else None
            trained = [attempt for attempt in run.attempts(index) if attempt.to_step > attempt.from_step]
            log = store.history(checkpoint) if checkpoint else []
            skips = run.skips()
        except BatonError as error:
            # Shown without them, as the chunk itself is done.
            logger.warning("the page of chunk %d lacks its figures: %s", index, error)
            return cls(run, index, outcome, plan, None, [], None)
        return cls(run, index, outcome, plan, checkpoint, log, trained[-1] if trained else None, skips)

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


def progress_page(shown: Shown) -> str:
    train, evals = shown.series("loss"), shown.series("eval_loss")
    values = [value for _, value in (*train, *evals)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    spread, last = (high - low) or 1.0, shown.plan.num_steps or 1

    def place(points: Points) -> list[str]:
        every = -(-len(points) // MAX_POINTS) or 1
        thinned = [*points[:-1:every], *points[-1:]]
        return [f"{WIDTH * x / last:.1f},{HEIGHT * (high - y) / spread:.1f}" for x, y in thinned]

    attempt = shown.attempt
    chunk = (attempt.from_step, attempt.to_step) if attempt else (shown.outcome.step, shown.outcome.step)
    return _pages.get_template("progress.html.j2").render(
        shown=shown,
        train=place(train),
        evals=[point.split(",") for point in place(evals)],
        low=low,
        high=high,
        last=last,
        chunk=[WIDTH * step / last for step in chunk],
        skipped=[WIDTH * skip.step / last for skip in shown.skips],
        width=WIDTH,
        height=HEIGHT,
        loss=_last(train),
        eval_loss=_last(evals),
    )


def _last(points: Points) -> float | None:
    return points[-1][1] if points else None
