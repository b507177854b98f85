"""What a second process brings."""

from __future__ import annotations

import os

from benchmarks.bench import Bench
from benchmarks.ours import Ours, every_step
from benchmarks.table import Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "parallel"
TITLE = "the same steps in two processes (ddp, gloo) and in one"


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, first, last = bench.options.small, 4, 8 if bench.options.quick else 24
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds(dear=True):
        for processes in (1, 2):
            run = ours.run(size, steps=last, processes=processes)
            trace = ours.chunk(run, 1)
            keep(columns, {f"step {processes}": every_step(trace, first, last) / (last - first)})
            started = trace.at("phase", phase="train") - trace.all("stage")[0]["at"]
            keep(columns, {f"start {processes}": started})
    cores = len(os.sched_getaffinity(0))
    gain = [one / two for one, two in zip(columns["step 1"], columns["step 2"], strict=True)]
    return Row(
        title=TITLE,
        conditions=f"{size}; one torch thread in each process, {cores} cores; {last - first} steps",
        figures=[
            Figure(
                what="efficiency: half the gain",
                unit="%",
                ours=[50 * value for value in gain],
                at_least=80,
                void="" if cores > 2 else "two cores hold both processes and whatever else runs here",
            ),
            Figure(
                what="step",
                unit="s",
                ours=columns["step 2"],
                theirs=columns["step 1"],
                other="one process",
                ratio=gain,
            ),
            Figure(
                what="from the stage's start to the first step",
                unit="s",
                ours=columns["start 2"],
                theirs=columns["start 1"],
                other="one process",
            ),
        ],
        notes=["the batch is the same: each of two processes has half of its rows"],
    )
