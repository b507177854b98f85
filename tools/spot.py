"""Prices and missed deadlines of policies for spot capacity, on recorded availability.

`python -m tools.spot docs/internals/spot.md` writes the page. Times are in seconds, prices in hours of spot capacity.
The traces are SkyPilot's (github.com/skypilot-org/spot-traces, Apache 2.0), of AWS in 2022 and 2023.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from baton.runs.capacity import ON_DEMAND, SPOT, Course

TRACES = Path(__file__).parents[1] / "tests" / "assets" / "spot.json"
RUNS = TRACES.with_name("spot_runs.json")  # of `tools/spot_runs.py`
GRID = 180  # seconds between two looks at a trace; the changes below are multiples
PRICE = {SPOT: 1.0, ON_DEMAND: 3.0}
WORK_H = (24, 48)
TIMES = (1.1, 1.25, 1.5, 1.75, 2.0)  # deadline, as a multiple of the work
CHANGES_MIN = (3, 12)
CHUNKS_MIN = (10, 30, 60)
STARTS = 6  # of each trace, evenly spread
TIGHT = 1.25  # deadlines at which greedy is far from the optimum
EPSILON = 1e-6


class Trace:
    """Times at which one spot machine could be had."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        """Reads run lengths of 0 and 1, each looked at every `gap_seconds`."""
        samples = np.concatenate([np.full(count, state, bool) for state, count in recorded["runs"]])
        times = np.arange(0, len(samples) * recorded["gap_seconds"], GRID)
        self.states = samples[times // recorded["gap_seconds"]]
        self.length = len(self.states) * GRID
        self._edges = [*((np.flatnonzero(np.diff(self.states)) + 1) * GRID).tolist(), math.inf]

    def state(self, moment: float) -> tuple[bool, float]:
        """Returns whether there is capacity at a moment, and when that changes."""
        at = bisect.bisect_right(self._edges, moment)
        return bool(self.states[0]) ^ (at % 2 == 1), self._edges[at]


class Ended(NamedTuple):
    price: float
    time: float  # from the start to the end of the work


class Job:
    """A job on a trace: the machine it has, what it has done and paid."""

    def __init__(self, trace: Trace, start: float, course: Course) -> None:
        self._trace, self._start, self._course = trace, start, course
        self.now = self.done = self.price = 0.0
        self.machine: str | None = None
        self._changing = 0.0  # seconds until the machine works

    @property
    def left(self) -> float:
        return self._course.work - self.done

    def spot(self) -> tuple[bool, float]:
        """Returns whether there is spot capacity, and when that changes."""
        state, change = self._trace.state(self._start + self.now)
        return state, change - self._start

    def wait(self, until: float) -> None:
        self.machine, self.now = None, max(self.now, until)

    def run(self, capacity: str, work: float) -> None:
        """Works for some seconds on a machine, less where a spot machine is taken away."""
        if self.machine != capacity:
            self.machine, self._changing = capacity, self._course.change
        time = self._changing + min(work, self.left)
        if capacity == SPOT:
            time = min(time, self.spot()[1] - self.now)
        self.now += time
        self.price += time * PRICE[capacity] / 3600
        self.done += max(time - self._changing, 0.0)
        self._changing = max(self._changing - time, 0.0)
        if capacity == SPOT and not self.spot()[0]:
            self.machine = None

    def ended(self) -> Ended:
        return Ended(self.price, self.now)


def on_demand(job: Job, course: Course) -> Ended:
    job.run(ON_DEMAND, course.work)
    return job.ended()


def spot_alone(job: Job, course: Course) -> Ended:
    while job.left > EPSILON:
        is_there, change = job.spot()
        if is_there:
            job.run(SPOT, job.left)
        elif change == math.inf:
            return Ended(job.price, math.inf)
        else:
            job.wait(change)
    return job.ended()


def greedy(job: Job, course: Course) -> Ended:
    """Waits for spot until only on demand meets the deadline."""
    while job.left > EPSILON:
        latest = course.time - job.left - 2 * course.change
        is_there, change = job.spot()
        if job.now > latest - EPSILON:
            job.run(ON_DEMAND, job.left)
        elif is_there:
            job.run(SPOT, job.left)
        else:
            job.wait(min(change, latest))
    return job.ended()


def uniform_progress(job: Job, course: Course) -> Ended:
    """Follows the paper's rules, at any moment."""
    pace = course.time / course.work
    while job.left > EPSILON:
        latest = course.time - job.left - 2 * course.change
        is_there, change = job.spot()
        ahead = job.done * pace - job.now
        if is_there and job.now <= latest + EPSILON:
            job.run(SPOT, job.left)
        elif job.machine is None and job.now < latest - EPSILON and ahead > EPSILON:
            job.wait(min(change, latest, job.now + ahead))
        elif job.machine and job.now < latest - EPSILON and ahead >= 2 * course.change:
            job.wait(job.now)
        else:  # until there is spot capacity, or it is far enough ahead to wait
            catches_up = (2 * course.change - ahead) / (pace - 1)
            until = min(change - job.now, catches_up) if job.now < latest - EPSILON else math.inf
            job.run(ON_DEMAND, max(until, 1.0))
    return job.ended()


def baton(chunk: float) -> Callable[[Job, Course], Ended]:
    """Returns the policy of a run with chunks of some seconds."""

    def policy(job: Job, course: Course) -> Ended:
        capacity = SPOT
        for end in np.append(np.arange(chunk, course.work - EPSILON, chunk), course.work):
            while end - job.done > EPSILON:
                is_there, change = job.spot()
                until = course.spot_until(job.done)
                if capacity == ON_DEMAND or is_there:
                    job.run(capacity, end - job.done)
                elif job.now < until - EPSILON:
                    job.wait(min(change, until))
                else:
                    capacity = ON_DEMAND
            capacity = course.after_chunk(job.machine, job.done, job.now)
        return job.ended()

    return policy


def optimum(trace: Trace, start: float, course: Course) -> float:
    """Returns the least price for the deadline, by dynamic programming over the whole trace."""
    changing, unit = round(course.change / GRID), GRID / 3600
    work, time = round(course.work / GRID), round(course.time / GRID)
    first = round(start / GRID)
    # Price of the rest by the work that is left, without a machine; and with one by its time until it works.
    idle = np.full(work + 1, math.inf)
    idle[0] = 0.0
    rest = {capacity: [idle] * (changing + 1) for capacity in PRICE}
    for state in trace.states[first : first + time][::-1]:
        there = [ON_DEMAND, SPOT] if state else [ON_DEMAND]
        used = {
            # A step of work takes one from what is left; of a change, one from the time until it works.
            capacity: [np.append(0.0, rest[capacity][0][:-1]) + PRICE[capacity] * unit]
            + [later + PRICE[capacity] * unit for later in rest[capacity][:-1]]
            for capacity in there
        }
        free = np.minimum.reduce([idle, *(used[capacity][-1] for capacity in there)])
        rest = {
            capacity: [np.minimum(free, own) for own in used.get(capacity, [free] * (changing + 1))]
            for capacity in PRICE
        }
        idle = free
        for prices in (idle, *itertools.chain(*rest.values())):
            prices[0] = 0.0
    return float(idle[work])


POLICIES: dict[str, Callable[[Job, Course], Ended]] = {
    "on demand": on_demand,
    "spot alone": spot_alone,
    "greedy": greedy,
    "Uniform Progress": uniform_progress,
    **{f"Baton, {minutes} min": baton(minutes * 60.0) for minutes in CHUNKS_MIN},
}
OPTIMUM = "optimum"


class Case(NamedTuple):
    work_h: int
    times: float
    change_min: int


def cases() -> Iterator[tuple[Case, Trace, float, Course]]:
    """Yields each case with each trace and start that are long enough for it."""
    recorded = json.loads(TRACES.read_text(encoding="utf-8"))
    traces = [Trace(trace) for trace in recorded.values()]
    for case in itertools.starmap(Case, itertools.product(WORK_H, TIMES, CHANGES_MIN)):
        course = Course(case.work_h * 3600, case.work_h * case.times * 3600, case.change_min * 60)
        for trace in traces:
            room = trace.length - course.time - 2 * 3600
            for number in range(STARTS if room > 0 else 0):
                yield case, trace, room * number / (STARTS - 1) // GRID * GRID, course


class Tally:
    """Prices and missed deadlines of one case."""

    def __init__(self) -> None:
        self.prices: dict[str, list[float]] = defaultdict(list)
        self.missed: dict[str, int] = defaultdict(int)

    def mean(self, policy: str) -> float:
        return float(np.mean(self.prices[policy]))

    def misses(self, policy: str) -> str:
        share = self.missed[policy] / len(self.prices[policy])
        return f" (misses {share:.0%})" if share else ""


def simulate() -> dict[Case, Tally]:
    """Runs every policy on every case."""
    tallies: dict[Case, Tally] = defaultdict(Tally)
    for case, trace, start, course in cases():
        tally = tallies[case]
        for name, policy in POLICIES.items():
            ended = policy(Job(trace, start, course), course)
            tally.prices[name].append(ended.price)
            tally.missed[name] += ended.time > course.time + EPSILON
        tally.prices[OPTIMUM].append(optimum(trace, start, course))
    return tallies


REAL = """\
## Real runs and their forecasts

```
python -m tools.spot_runs FOLDER
```

The quickstart in two chunks, a checkpoint each ten seconds, once under each trace, an hour of it in ten seconds. A
training process is killed at the moment its trace loses the machine. A *forecast* follows an undisturbed run, and the
rate of the trace's losses and their mean length. *End* is from the start of the first stage to the end of the last one.
*Limit* is the budget. Times are in seconds. Two traces have no start with few losses; {twice} were run twice.
{within} of {runs} device times and {ends} of {runs} ends are within their 90%. {kept} of {runs} runs kept their limit,
{exported} with an evaluated and exported model. Two cores, {date}, commit {commit}.

Of 20 earlier runs, 18 device times and 16 ends were within theirs. Ranges then had the measured run's pace alone, and
ends the start of the process as well.
"""


def real_runs(measured: Any) -> list[str]:
    """Returns the lines about runs of `tools/spot_runs.py`."""
    rows = measured["rows"]

    def held(row: Any, key: str, value: str) -> bool:
        _, low, high = row["forecast"][key]
        return bool(low <= row[value] <= high)

    lines = REAL.format(
        within=sum(held(row, "device_seconds", "device_seconds") for row in rows),
        ends=sum(held(row, "seconds", "seconds") for row in rows),
        kept=sum(row["device_seconds"] <= row["limit"] for row in rows),
        exported=sum(row["model"] and row["state"] == "succeeded" for row in rows),
        runs=len(rows),
        twice=len(rows) - len({row["trace"] for row in rows}),
        date=measured["date"],
        commit=measured["commit"],
    ).splitlines()
    lines += ["", "| trace | kills | device time | forecast | end | forecast | limit | steps |", "|" + "---|" * 8]
    for row in rows:
        cells = [row["trace"].rpartition("/")[2], str(row["kills"])]
        for key, value in (("device_seconds", "device_seconds"), ("seconds", "seconds")):
            expected, low, high = row["forecast"][key]
            cells += [f"{row[value]:.0f}", f"{expected:.0f} ({low:.0f}–{high:.0f})"]
        cells += [f"{row['limit']:.0f}", str(row["steps"])]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


PAGE = """\
# Spot capacity under a deadline

Prices of a run with `resources.capacity: spot-first`, on recorded availability of spot machines.

```
python -m tools.spot docs/internals/spot.md
```

The simulator asks the policy of real runs, `baton/runs/capacity.py`. Prices are shares of the price on demand; spot
costs {spot:.0%} of it. *Deadline* is a multiple of the work. *Change* is the time before a new machine works, and is
paid. Baton decides after each chunk of 10, 30 or 60 minutes, and when a spot machine is lost.

The {traces} traces are SkyPilot's, of AWS (`tests/assets/spot.json`), in steps of {grid} minutes. Each case takes
{starts} starts of every trace that is long enough. *Optimum* knows the whole trace. *Uniform Progress* and *greedy*
follow Wu et al., NSDI 2024, by our reading of its rules. Spot alone pays less where the trace ends before the work.
"""


def page(tallies: dict[Case, Tally]) -> str:
    """Returns the page with a table for each length of work."""
    names, traces = [*POLICIES, OPTIMUM], json.loads(TRACES.read_text(encoding="utf-8"))
    spot = PRICE[SPOT] / PRICE[ON_DEMAND]
    lines = PAGE.format(spot=spot, traces=len(traces), grid=GRID // 60, starts=STARTS).splitlines()
    for work_h in WORK_H:
        lines += ["", f"## {work_h} hours of work", "", f"| deadline | change | {' | '.join(names)} |"]
        lines.append("|" + "---|" * (len(names) + 2))
        for case, tally in tallies.items():
            if case.work_h == work_h:
                whole = tally.mean("on demand")
                cells = [f"{tally.mean(name) / whole:.0%}{tally.misses(name)}" for name in names]
                lines.append(f"| {case.times:g} × | {case.change_min} min | {' | '.join(cells)} |")
    lines += [
        "",
        "## Comparison",
        "",
        "| policy | price as a multiple of Uniform Progress | range of the cases | share of greedy's gap closed |",
        "|---|---|---|---|",
    ]
    tight = [tally for case, tally in tallies.items() if case.times <= TIGHT]
    gap = sum(tally.mean("greedy") - tally.mean(OPTIMUM) for tally in tight)
    for name in list(POLICIES)[2:]:
        ratios = [tally.mean(name) / tally.mean("Uniform Progress") for tally in tallies.values()]
        closed = sum(tally.mean("greedy") - tally.mean(name) for tally in tight) / gap
        lines.append(f"| {name} | {np.mean(ratios):.2f} | {min(ratios):.2f}–{max(ratios):.2f} | {closed:.0%} |")
    lines += ["", f"Greedy's *gap* is its price above the optimum, for deadlines of at most {TIGHT:g} × the work.", ""]
    lines += real_runs(json.loads(RUNS.read_text(encoding="utf-8")))
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(simulate()), encoding="utf-8")
