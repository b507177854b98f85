"""Cost of an upload during training, by size and number of parts."""

from __future__ import annotations

from statistics import median

from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.rows import frontier
from benchmarks.table import Chart, Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "frontier-knobs"
TITLE = "what a checkpoint costs by the size of its parts, and by how many are under way"
MEGABYTE = 1024 * 1024
PARTS = (8, 16, 32)
"""Megabytes of a part; S3 takes none below 5."""
PARALLEL = (1, 4, 8)
"""Parts of a file under way at once."""


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    steps, every = (12, 4) if bench.options.quick else (48, 4)
    grid = [(part, parallel) for part in PARTS for parallel in PARALLEL]
    if bench.options.quick:
        grid = grid[:2]
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds(dear=True):
        plain = frontier.window(bench, ours, size, steps)
        for part, parallel in grid:
            knobs = {"PART": part * MEGABYTE, "PARALLEL": parallel}
            found = frontier.window(bench, ours, size, steps, every, knobs)
            keep(columns, {f"{part} {parallel} {name}": value for name, value in found.costs(plain).items()})
            if found.arrived:
                upload = median(event["seconds"]["upload"] for event in found.arrived)
                keep(columns, {f"{part} {parallel} upload": upload})
    kinds = (("extra time", "time", "%"), ("extra CPU of the trainer's thread", "thread", "%"))
    kinds += (("CPU of the process, a checkpoint", "process", "s"), ("upload during training", "upload", "s"))
    return Row(
        title=TITLE,
        conditions=f"{size}; a checkpoint every {every} of {steps} steps; one torch thread",
        figures=[
            Figure(
                what=f"{part} MB, {parallel} at once: {what}",
                unit=unit,
                ours=columns.get(f"{part} {parallel} {name}", []),
            )
            for part, parallel in grid
            for what, name, unit in kinds
        ],
        charts={
            "cpu": Chart(
                title="Processor time of a checkpoint's upload",
                unit="s",
                bars={f"{a} MB, {b} at once": {"process": median(columns[f"{a} {b} process"])} for a, b in grid},
            )
        },
        notes=[*frontier.NOTES, "a file that is smaller than a part is sent as one, whatever is said of parts"],
    )
