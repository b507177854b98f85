"""What it costs that each step is watched."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from typing import Any

from benchmarks.bench import Bench
from benchmarks.guarding import RECORD
from benchmarks.ours import Ours
from benchmarks.table import Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "guard"
TITLE = "steps that the guard watches, among as many of the same run that it does not"
WINDOW = 100
"""Steps that the guard remembers by default; what it costs grows with those that it remembers."""
Times = list[tuple[bool, float, float]]


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, window = bench.options.small, 4 if bench.options.quick else WINDOW
    first = 2 * window + 4
    steps = first + (16 if bench.options.quick else 240)
    cores = len(os.sched_getaffinity(0))
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds():
        for processes in (1, 2):
            times = _times(bench, ours, steps, window, processes)[first:]
            for at, clock in ((1, "clock"), (2, "thread")):
                watched, alone, extra = _compare(times, at)
                keep(columns, {f"{clock} {processes}": 1e3 * watched, f"{clock} {processes} alone": 1e3 * alone})
                keep(columns, {f"{clock} {processes} extra": 100 * extra / alone})
    return Row(
        title=TITLE,
        conditions=f"{size}; a window of {window} steps that is full; one torch thread in each process, {cores} cores; "
        f"{steps - first} steps in fours, of which the first and the last are watched",
        preparation="no other side",
        figures=[
            figure
            for processes in (1, 2)
            for clock, name in (("clock", "by the clock"), ("thread", "seconds of the training thread"))
            for figure in _figures(columns, f"{clock} {processes}", f"{_counted(processes)}, {name}", clock == "clock")
        ],
        notes=[
            "extra: median of what the watched two of each four steps took more than the other two, of a step's median",
            "two processes exchange loss and norm of each step that is watched",
        ],
    )


def _times(bench: Bench, ours: Ours, steps: int, window: int, processes: int) -> Times:
    """Trains, and returns what the first process noted of each step."""
    guard = f"{{loss: 1.0e+9, grad_norm: 1.0e+9, window: {window}}}"  # looked at, and never beyond
    overrides = [f"training.guard={guard}", "hooks.trainer=benchmarks.guarding:Alternating"]
    run = ours.run(bench.options.small, steps=steps, overrides=overrides, processes=processes)
    path = os.path.join(bench.work, "steps.json")
    os.environ[RECORD] = path
    try:
        ours.chunk(run, 1)
    finally:
        del os.environ[RECORD]
    with open(path, encoding="utf-8") as file:
        times: Times = json.load(file)
    os.remove(path)
    return times


def _compare(times: Any, at: int) -> tuple[float, float, float]:
    """Returns the medians of a watched step, of another, and of how much longer a watched one takes.

    Args:
        times: Whether each step was watched, and when it began.
        at: By which of its two clocks.
    """
    seconds = [(now[0], after[at] - now[at]) for now, after in itertools.pairwise(times)]
    fours = [seconds[start : start + 4] for start in range(0, len(seconds) - 3, 4)]
    sides = [
        tuple(statistics.mean(took for is_watched, took in four if is_watched is side) for side in (True, False))
        for four in fours
    ]
    watched, alone = (statistics.median(side) for side in zip(*sides, strict=True))
    return watched, alone, statistics.median(one - other for one, other in sides)


def _figures(columns: dict[str, list[float]], key: str, name: str, judged: bool) -> list[Figure]:
    return [
        Figure(
            what=f"{name}: step",
            unit="ms",
            ours=columns[key],
            theirs=columns[f"{key} alone"],
            other="not watched",
        ),
        Figure(what=f"{name}: extra", unit="%", ours=columns[f"{key} extra"], at_most=1 if judged else None),
    ]


def _counted(processes: int) -> str:
    return "one process" if processes == 1 else "two processes (ddp, gloo)"
