"""How close checkpoints follow each other, against what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from baton.recipe.run import CONTINUOUS
from benchmarks.bench import Bench
from benchmarks.ours import Ours, every_step
from benchmarks.process import Event, Trace
from benchmarks.sizes import Size
from benchmarks.table import Chart, Figure, Row, keep, share
from benchmarks.theirs import Theirs

NAME = "frontier"
TITLE = "interval of checkpoints, against their cost"
AGAIN = "again"
"""A second process without checkpoints: what it costs more than the first is noise."""
FIRST = 8
"""Step from whose end on is measured: those before warm up."""
NOTES = (
    "cost: of the same steps with checkpoints and without, in two processes one after the other; the trainer's thread "
    "by its processor time; what a second one without checkpoints costs more is noise",
    "the server's processor time is that of the process that listens: what stores behind it is not in it",
)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps of one process between the end of `FIRST` and the end of the last.

    Attributes:
        steps: Their number.
        seconds: How long they took.
        thread: Processor time of the thread that trains, in seconds.
        process: Processor time of all of the process.
        server: Processor time of the server meanwhile, start and end of the process included; 0 where it is elsewhere.
        arrived: Checkpoints that arrived in them.
    """

    steps: int
    seconds: float
    thread: float
    process: float
    server: float
    arrived: Sequence[Event]

    @property
    def interval(self) -> float:
        """Seconds between two that arrived, all of them where there was but one."""
        times = [event["at"] for event in self.arrived]
        return median(b - a for a, b in pairwise(times)) if len(times) > 1 else self.seconds

    def costs(self, plain: Window) -> dict[str, float]:
        """Returns what a run of the same steps without checkpoints did not take, in percent and for each checkpoint."""
        count = max(1, len(self.arrived))
        return {
            "time": 100 * (self.seconds / plain.seconds - 1),
            "thread": 100 * (self.thread / plain.thread - 1),
            "process": (self.process - plain.process) / count,
            "server": max(0.0, self.server - plain.server) / count,
        }


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    steps = 24 if bench.options.quick else 64
    settings: list[int | str] = [4, CONTINUOUS] if bench.options.quick else [1, 4, 16, CONTINUOUS]
    columns: dict[str, list[float]] = {}
    for number in bench.rounds():
        keep(columns, {"upload": _upload(bench, size)})
        # In another order each round: a machine that becomes slower meanwhile would be taken for a cost.
        order: list[int | str | None] = [None, *settings, AGAIN]
        order = order[number % len(order) :] + order[: number % len(order)]
        found = {every: _window(bench, ours, size, steps, None if every == AGAIN else every) for every in order}
        plain = found.pop(None)
        keep(columns, {"step": plain.seconds / plain.steps})
        for every, measured in found.items():
            values = {**measured.costs(plain), "interval": measured.interval, "arrived": len(measured.arrived)}
            keep(columns, {f"{every} {name}": value for name, value in values.items()})
    noise = [("extra time", "time"), ("extra CPU of the trainer's thread", "thread")]
    return Row(
        title=TITLE,
        conditions=f"{size}; {steps} steps of {median(columns['step']):.2f} s; one torch thread",
        preparation="no other side",
        figures=[
            *(
                Figure(what=f"no checkpoints, {AGAIN}: {what}", unit="%", ours=columns[f"{AGAIN} {x}"])
                for what, x in noise
            ),
            *(figure for every in settings for figure in _figures(columns, every)),
        ],
        charts={"cost": _chart(columns, settings)},
        notes=list(NOTES),
    )


def _window(
    bench: Bench,
    ours: Ours,
    size: Size,
    steps: int,
    every: int | str | None = None,
) -> Window:
    """Trains some steps in a fresh process.

    Args:
        bench: The benchmark.
        ours: Its runs.
        size: What is trained.
        steps: Steps to measure.
        every: What `chunks.checkpoint_every` says.
    """
    last = FIRST + steps
    if every is not None:
        bench.server.expect(size.bytes * last / (every if isinstance(every, int) else 4))
    run = ours.run(size, steps=last + 1, every=every)  # one step more: the last of a chunk waits for its checkpoint
    before = bench.server.cpu()
    trace = ours.chunk(run, 1, until=lambda event: event["event"] == "step" and event["step"] == last)
    after = bench.server.cpu()
    ours.rewind(run)
    begins, ends = trace.at("step", step=FIRST), trace.at("step", step=last)
    return Window(
        steps=steps,
        seconds=every_step(trace, FIRST, last),
        thread=_spent(trace, "thread_cpu", last),
        process=_spent(trace, "process_cpu", last),
        server=after - before if before is not None and after is not None else 0.0,
        arrived=[event for event in trace.all("checkpoint") if begins <= event["at"] <= ends],
    )


def _spent(trace: Trace, name: str, last: int) -> float:
    first, then = (trace.all("step", step=step)[0] for step in (FIRST, last))
    return float(then[name] - first[name])


def _upload(bench: Bench, size: Size) -> float:
    """Returns the seconds that a process takes which does nothing else."""
    bench.server.expect(size.bytes)
    seconds = bench.transfer("send", bench.payload(size), f"{bench.server.uri}/frontier")["seconds"]
    bench.server.clear("frontier")
    return float(seconds)


def _figures(columns: Mapping[str, list[float]], every: int | str) -> list[Figure]:
    """Returns what is told of one setting: goals are those of checkpoints that follow each other."""
    is_goal = every == CONTINUOUS
    name = CONTINUOUS if is_goal else f"every {every} steps" if every != 1 else "every step"
    figures = [
        Figure(what=f"{name}: extra time", unit="%", ours=columns[f"{every} time"], at_most=5.0 if is_goal else None),
        Figure(
            what=f"{name}: extra CPU of the trainer's thread",
            unit="%",
            ours=columns[f"{every} thread"],
            at_most=2.0 if is_goal else None,
        ),
        Figure(what=f"{name}: CPU of the process, a checkpoint", unit="s", ours=columns[f"{every} process"]),
        Figure(what=f"{name}: CPU of the server, a checkpoint", unit="s", ours=columns[f"{every} server"]),
        Figure(what=f"{name}: checkpoints", unit="", ours=columns[f"{every} arrived"]),
    ]
    bound = [2 * upload + step for upload, step in zip(columns["upload"], columns["step"], strict=True)]
    other, goal = "2 uploads alone and a step", 1.0 if is_goal else None
    interval = share(f"{name}: interval", columns[f"{every} interval"], bound, other, unit="s", at_most=goal)
    return [interval, *figures]


def _chart(columns: Mapping[str, list[float]], settings: Sequence[int | str]) -> Chart:
    """Draws each cost over the interval, and where the checkpoints that follow each other lie."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for cost, what in (("time", "time"), ("thread", "the trainer's thread")):
        for every in settings:
            line = f"{what}, {CONTINUOUS}" if every == CONTINUOUS else what
            point = median(columns[f"{every} interval"]), median(columns[f"{every} {cost}"])
            lines.setdefault(line, []).append(point)
    return Chart(
        title="What checkpoints cost",
        unit="%",
        lines={name: sorted(points) for name, points in lines.items()},
        across="seconds between two that arrive",
    )
