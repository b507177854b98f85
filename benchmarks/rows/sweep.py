"""The best of eight configurations: by halving, in turns in warm processes, against eight whole runs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from baton import events
from baton.local.sweep import LocalSweep
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Sweep
from benchmarks.bench import Bench
from benchmarks.ours import ENVIRONMENT, RECIPE, Ours
from benchmarks.sizes import SIZES, Size
from benchmarks.table import Figure, Row, faster, keep, share
from benchmarks.theirs import Theirs

NAME = "sweep"
TITLE = "the best of eight learning rates: halving, the trials in turns, against eight whole runs one after the other"
RATES = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
CHUNKS, ETA, STEPS = 16, 4, 40
"""Chunks of a run, one of how many continues, and steps of a chunk."""


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, steps = SIZES["2m"], 2 if bench.options.quick else STEPS
    times: dict[str, list[float]] = {}
    counted: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    same: list[float] = []
    for number in bench.rounds():
        rates = {"method": "grid", "parameters": {"training.learning_rate": RATES}}
        common = (f"training.max_steps={steps * CHUNKS}", "training.lr_scheduler=cosine")
        halving = {**rates, "halving": {"eta": ETA}}
        halved = run_sweep(bench, ours, f"halved-{number}", size, halving, *common, f"chunks.count={CHUNKS}")
        whole = run_sweep(bench, ours, f"whole-{number}", size, rates, *common, "chunks.count=1")
        keep(times, {"halved": halved.took, "whole": whole.took, "first": halved.first})
        keep(counted, {"halved": float(halved.steps), "whole": float(whole.steps)})
        keep(seconds, {name: value / halved.chunks for name, value in halved.spent.items()})
        keep(seconds, {"chunk": sum(halved.spent.values()) / halved.chunks})
        same.append(float(halved.winner == whole.winner))
        bench.say(f"winner: {halved.winner} by halving, {whole.winner} of the whole runs")
    swap = [
        chunk - train - score
        for chunk, train, score in zip(*(seconds[x] for x in ("chunk", "train", "score")), strict=True)
    ]
    per_hour = [len(RATES) / took * 3600 for took in times["first"]]
    theirs_per_hour = [len(RATES) / took * 3600 for took in times["whole"]]
    ratio = [a / b for a, b in zip(per_hour, theirs_per_hour, strict=True)]
    return Row(
        title=TITLE,
        conditions=f"{size}; {CHUNKS} chunks of {steps} steps, eta {ETA}; one torch thread; data made beforehand",
        preparation="neither side",
        figures=[
            faster("time to the best", times["halved"], times["whole"], "8 runs", at_least=4),
            faster("steps to the best", counted["halved"], counted["whole"], "8 runs", unit="steps"),
            Figure(what="the same winner", unit="", ours=same, at_least=1),
            Figure(
                what="configurations compared an hour",
                unit="/h",
                ours=per_hour,
                theirs=theirs_per_hour,
                other="8 runs",
                ratio=ratio,
            ),
            share("swap", swap, seconds["chunk"], "chunk", unit="s", at_most=0.05),
        ],
        splits={"a chunk of the sweep": seconds},
        notes=[
            "8 runs: each in one chunk and one process, forked from the same warm server, scored at its end alone",
            "time: from the first trial's first process to the last rung's end; neither side exports",
            "compared an hour: until all eight have a first score, at the first rung and at the end of the whole runs",
            "swap: what a chunk's process does besides training and its score: start, build, restore, save, upload; "
            "it does not grow with the chunk's steps",
        ],
    )


class TimedSweep(LocalSweep):
    """A sweep that keeps the times of its first chunk, first rung and last one."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        self.began = self.first = self.ended = 0.0
        super().__init__(recipe, name, self._heard)

    def _heard(self, event: events.Event) -> None:
        match event:
            case events.Stage(stage, "started") if "train chunk" in stage:
                self.began = self.began or time.time()
            case events.Verdict():
                self.ended = time.time()
                self.first = self.first or self.ended

    def measured(self) -> TimedSweep:
        """Runs it, and sums its chunks."""
        self.winner = self.run().name.rpartition("-")[2]
        self.took, self.first = self.ended - self.began, self.first - self.began
        trials = Sweep(self.sweep.storage, self.sweep.name).document().trials
        self.runs = {trial.id: self.sweep.run(trial) for trial in trials}
        attempts = [attempt for run in self.runs.values() for attempt in run.attempts()]
        self.chunks = len(attempts)
        self.steps = sum(attempt.to_step - attempt.from_step for attempt in attempts)
        self.spent: dict[str, float] = {}
        for attempt in attempts:
            for phase, seconds in attempt.seconds.items():
                self.spent[phase] = self.spent.get(phase, 0.0) + seconds
        return self


def run_sweep(
    bench: Bench, ours: Ours, name: str, size: Size, search: Mapping[str, Any], *overrides: str
) -> TimedSweep:
    """Runs a sweep of the benchmark's recipe on this machine, in a folder.

    Args:
        bench: The benchmark.
        ours: The side that has the rows.
        name: Name of the sweep.
        size: Its model.
        search: The recipe's section `sweep`.
        overrides: Further changes to the recipe.
    """
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name != "BATON_EVENTS"})
    common = [f"store.uri={bench.work}/sweeps", f"data.source={ours.rows()}", "data.split.eval=128"]
    document = load.load(RECIPE, [*common, *size.overrides, *overrides]).model_dump(mode="json")
    return TimedSweep(load.validate({**document, "sweep": dict(search)}, origin=RECIPE), name).measured()
