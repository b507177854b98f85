"""What virtual workers cost: the same passes by plain DDP, and the memory of both."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from baton.runs.run import Run
from benchmarks.bench import Bench
from benchmarks.ours import Ours, every_step
from benchmarks.process import Event, Trace
from benchmarks.sizes import Size
from benchmarks.table import Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "virtual"
TITLE = "the same passes with four virtual workers and by plain DDP (gloo)"
WORKERS = 4
SIDES: dict[str, int | None] = {"ddp": None, "virtual": WORKERS}
PROCESSES = (1, 2, 4)
PERIOD = 0.1
"""Seconds between two looks at all processes' memory."""
MB = 1e6


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    sizes = {size.name: size for size in (bench.options.small, bench.options.large)}
    first, last = 4, 8 if bench.options.quick else 24
    columns: dict[str, list[float]] = {}
    for number in bench.rounds():
        sides = list(SIDES)[:: 1 if number % 2 else -1]  # what warms the machine up is now the one, now the other
        for size in sizes.values():
            for side in sides:
                trace = _chunk(ours, _run(ours, size, last, side, 2), last)
                keep(columns, {f"{size.name} {side}": every_step(trace, first, last) / (last - first)})
        for processes in PROCESSES:
            for side in sides:
                with watched() as most:
                    _chunk(ours, _run(ours, bench.options.large, last, side, processes), 3)
                name = f"{side} {processes}"
                keep(
                    columns, {f"{name} one": most.one / MB, f"{name} own": most.own / MB, f"{name} all": most.all / MB}
                )
    cores = len(os.sched_getaffinity(0))
    return Row(
        title=TITLE,
        conditions=f"{'; '.join(map(str, sizes.values()))}; one torch thread in each process, {cores} cores; "
        f"{last - first} steps, passes of {', '.join(str(size.batch // WORKERS) for size in sizes.values())} rows",
        preparation="neither side",
        figures=[_step(name, columns) for name in sizes]
        + [_memory(processes, kind, columns) for processes in PROCESSES for kind in ("one", "own", "all")],
        notes=[
            "DDP has the same micro-batch, so each process as many passes a step",
            f"memory: {bench.options.large.name}, three steps; of the largest process its RSS and what is its "
            "own alone (USS), of all together what they hold (PSS), each at its peak",
        ],
    )


def _run(ours: Ours, size: Size, steps: int, side: str, processes: int) -> Run:
    micro = size.batch // WORKERS
    return ours.run(size, steps=steps, micro_batch_size=micro, processes=processes, virtual_workers=SIDES[side])


def _chunk(ours: Ours, run: Run, last: int) -> Trace:
    """Runs a chunk up to a step: what comes after is the same on both sides."""

    def is_over(event: Event) -> bool:
        return event["event"] == "step" and event["step"] >= last

    return ours.chunk(run, 1, until=is_over)


def _step(name: str, columns: dict[str, list[float]]) -> Figure:
    ours, plain = columns[f"{name} virtual"], columns[f"{name} ddp"]
    return Figure(
        what=f"step in two processes, {name}",
        unit="s",
        ours=ours,
        theirs=plain,
        other="DDP",
        ratio=[a / b for a, b in zip(ours, plain, strict=True)],
        at_most=1.15,
    )


def _memory(processes: int, kind: str, columns: dict[str, list[float]]) -> Figure:
    what = {"one": "RSS of a process", "own": "USS of a process", "all": "all processes"}[kind]
    ours, plain = (columns[f"{side} {processes} {kind}"] for side in ("virtual", "ddp"))
    return Figure(
        what=f"×{processes}: {what}",
        unit="MB",
        ours=ours,
        theirs=plain,
        other="DDP" if processes > 1 else "one process",
        ratio=[a / b for a, b in zip(ours, plain, strict=True)],
    )


@dataclass
class Most:
    """The most memory that this process's children held.

    Attributes:
        one: Of one of them, as it sees it (RSS).
        own: Of one of them, what no other shares (USS).
        all: Of all at one moment (PSS).
    """

    one: int = 0
    own: int = 0
    all: int = 0


@contextlib.contextmanager
def watched(*, servers: bool = False) -> Iterator[Most]:
    """Watches the children that train; servers, which were there before, count only where asked."""
    most, over = Most(), threading.Event()
    before = set() if servers else {child.pid for child in psutil.Process().children(recursive=True)}

    def look() -> None:
        while not over.is_set():
            held = []
            for child in psutil.Process().children(recursive=True):
                if child.pid not in before:
                    with contextlib.suppress(psutil.Error):
                        held.append(child.memory_full_info())
            most.one = max([most.one, *(memory.rss for memory in held)])
            most.own = max([most.own, *(memory.uss for memory in held)])
            most.all = max(most.all, sum(memory.pss for memory in held))
            time.sleep(PERIOD)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()
