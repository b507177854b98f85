"""From a process's start to the end of its first step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.bench import Bench
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import Event, Trace
from benchmarks.table import Chart, Figure, Row, keep, share
from benchmarks.theirs import Theirs

NAME = "imports"
TITLE = "start of a process to the end of its first step, without fetching"
LARGEST = 12
"""Libraries that are shown by themselves."""


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    theirs.inputs(size)
    modules = ours.modules()
    run = ours.run(size, steps=4)
    columns: dict[str, list[float]] = {}
    splits: dict[str, dict[str, list[float]]] = {"ours": {}, "script": {}}
    libraries: dict[str, dict[str, list[float]]] = {"ours": {}, "script": {}}
    for _ in bench.rounds():
        trace = ours.chunk(run, 1, until=_has_stepped)
        ours.rewind(run)
        script = theirs.process(theirs.begin("imports"), size, steps=4, target=4, until=_has_stepped)
        for side, found, split in (("ours", trace, _ours(trace)), ("script", script, _theirs(script))):
            keep(splits[side], split)
            keep(columns, {side: sum(split.values()), f"{side} memory": found.peak_memory / 1e6})
        keep(libraries["ours"], _libraries(["-m", "benchmarks.imports", modules]))
        keep(libraries["script"], _libraries(["-m", "benchmarks.script", os.devnull]))
    return Row(
        title=TITLE,
        conditions=f"{size}; a fresh interpreter on each side, one torch thread, nothing warm but the disk",
        preparation="neither side",
        figures=[
            share("start to first step", columns["ours"], columns["script"], "script", unit="s", at_most=0.5),
            Figure(
                what="memory then",
                unit="MB",
                ours=columns["ours memory"],
                theirs=columns["script memory"],
                other="script",
            ),
        ],
        splits=splits,
        notes=[
            "start: until a chunk's own code runs; the script's is part of its imports",
            "build: the model and the trainer, of tokens made beforehand",
            *(f"imports by library, {side}: {_largest(libraries[side])}" for side in libraries),
        ],
        charts={"split": Chart.of_splits("Seconds from a process's start to its first step", splits)},
    )


def _has_stepped(event: Event) -> bool:
    return event["event"] == "step"


def _ours(trace: Trace) -> dict[str, float]:
    import_at, fetch_again = trace.at("phase", phase="import"), trace.at("phase", last=True, phase="fetch")
    build, restore = trace.at("phase", phase="build"), trace.at("phase", phase="restore")
    return {
        "start": trace.at("phase", phase="fetch") - trace.spawned,
        "import": fetch_again - import_at,
        "build": restore - build,
        "first step": trace.at("step") - restore,
    }


def _theirs(trace: Trace) -> dict[str, float]:
    return {
        "import": trace.at("imported") - trace.spawned,
        "build": trace.at("built") - trace.at("got"),
        "first step": trace.at("step") - trace.at("built"),
    }


def _libraries(command: Sequence[str]) -> dict[str, float]:
    """Returns the seconds that each library's own modules take to be imported, without those that they import."""
    told = subprocess.run(
        [sys.executable, "-X", "importtime", *command], env={**ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    seconds: dict[str, float] = {}
    for line in told.stderr.splitlines():
        if line.startswith("import time:") and (own := line.split(":")[1].split("|")[0].strip()).isdigit():
            library = line.rpartition("|")[2].strip().partition(".")[0]
            seconds[library] = seconds.get(library, 0.0) + int(own) / 1e6
    return seconds


def _largest(libraries: dict[str, list[float]]) -> str:
    medians = {name: sorted(values)[len(values) // 2] for name, values in libraries.items()}
    ordered = sorted(medians, key=lambda name: -medians[name])
    listed = [f"{name} {medians[name]:.2f}" for name in ordered[:LARGEST]]
    return ", ".join([*listed, f"all others {sum(medians[name] for name in ordered[LARGEST:]):.2f}"]) + " s"
