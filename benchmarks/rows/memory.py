"""How much memory training takes with its checkpoints."""

from __future__ import annotations

import statistics

from benchmarks.bench import Bench, parse_mark
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import Trace, watch
from benchmarks.sizes import Size
from benchmarks.table import Figure, Row, keep, share
from benchmarks.theirs import Theirs

NAME = "memory"
TITLE = "peak host memory: restore, train, save, upload"
MB = 1e6


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.large
    theirs.inputs(size)
    modules = ours.modules()
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds():
        base = watch(["-m", "benchmarks.imports", modules], parse_mark, environment=ENVIRONMENT).all("imported")
        chunk, recorded = _ours(bench, ours, size)
        script = _theirs(bench, theirs, size)
        keep(columns, {"base": base[0]["peak"] / MB, "recorded": recorded / MB})
        for side, trace in (("ours", chunk), ("script", script)):
            keep(columns, {f"{side} process": trace.peak_memory / MB, f"{side} folder": trace.peak_folder / MB})
            keep(columns, {f"{side} both": trace.peak_both / MB})
    state, copy = 16 * size.parameters / MB, size.bytes / MB
    expected = [state + copy + base for base in columns["base"]]
    return Row(
        title=TITLE,
        conditions=f"{size}; 2 steps after a restore; one torch thread on each side",
        preparation="neither side",
        figures=[
            share(
                "process and folder at one moment",
                columns["ours both"],
                expected,
                "state + copy + base",
                unit="MB",
                at_most=1.05,
            ),
            _beside_script("the same", columns, "both"),
            _beside_script("process alone, VmHWM", columns, "process"),
            Figure(what="the same, as its record says", unit="MB", ours=columns["recorded"]),
            _beside_script("folder in memory", columns, "folder"),
        ],
        notes=[
            f"state: weights, gradients and both moments, {state:.0f} MB; copy: one checkpoint, {copy:.0f} MB; base: "
            f"a process that only imported, {statistics.median(columns['base']):.0f} MB",
            "VmHWM counts pages of the folder that are mapped, the sum of process and folder counts them once",
        ],
    )


def _ours(bench: Bench, ours: Ours, size: Size) -> tuple[Trace, int]:
    """Returns a chunk that restored, and the peak that its record names."""
    bench.server.expect(2 * size.bytes)
    run = ours.run(size, steps=4, count=2)
    ours.chunk(run, 1)
    chunk = ours.chunk(run, 2)
    recorded = int(ours.record(run, 2)["peak_bytes"])
    ours.rewind(run)
    return chunk, recorded


def _theirs(bench: Bench, theirs: Theirs, size: Size) -> Trace:
    bench.server.expect(2 * size.bytes)
    uri = theirs.begin("memory")
    theirs.process(uri, size, steps=4, target=2)
    script = theirs.process(uri, size, steps=4, target=4)
    theirs.begin("memory")
    return script


def _beside_script(what: str, columns: dict[str, list[float]], name: str) -> Figure:
    theirs = columns[f"script {name}"]
    return Figure(what=what, unit="MB", ours=columns[f"ours {name}"], theirs=theirs, other="script")
