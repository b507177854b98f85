"""What it costs to train in many chunks what could be trained in one."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.table import Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "chunks"
TITLE = "the same steps in many chunks and in one"


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, count = bench.options.small, 2 if bench.options.quick else 8
    steps = 4 * count
    columns: dict[str, list[float]] = {}
    splits: dict[str, list[float]] = {}
    for _ in bench.rounds():
        one, many = (_seconds(bench, ours, steps, number) for number in (1, count))
        keep(columns, {"one": one["wall"], "many": many["wall"]})
        keep(columns, {"boundary": (many["wall"] - one["wall"]) / (count - 1)})
        phases = [name for name in many if name not in ("wall", "total")]
        split = {name: (many[name] - one.get(name, 0.0)) / (count - 1) for name in phases}
        split["exit"] = columns["boundary"][-1] - (many["total"] - one["total"]) / (count - 1)
        keep(splits, split)
    return Row(
        title=f"the same {steps} steps in {count} chunks and in one",
        conditions=f"{size}; one torch thread; chunks run one after the other, without the checkpoint stages beside",
        preparation="neither side",
        figures=[
            Figure(what="wall clock", unit="s", ours=columns["many"], theirs=columns["one"], other="one chunk"),
            Figure(what="overhead per boundary", unit="s", ours=columns["boundary"]),
        ],
        splits={"per boundary": splits},
        notes=["a phase's seconds in all chunks less those in the one, by boundary; train is what the two differ by"],
    )


def _seconds(bench: Bench, ours: Ours, steps: int, count: int) -> Mapping[str, float]:
    """Returns wall-clock seconds of all chunks of a run, and their seconds by phase."""
    size = bench.options.small
    bench.server.expect(count * size.bytes)
    run = ours.run(size, steps=steps, count=count)
    traces = [ours.chunk(run, index) for index in range(1, count + 1)]
    found: dict[str, float] = {"wall": traces[-1].ended - traces[0].spawned, "total": 0.0}
    for index in range(1, count + 1):
        record = ours.record(run, index)
        found["total"] += record["total_seconds"]
        for phase, seconds in record["seconds"].items():
            found[phase] = found.get(phase, 0.0) + seconds
    ours.rewind(run)
    return found
