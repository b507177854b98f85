"""A process that is lost in its pod, until the next one has trained a step."""

from __future__ import annotations

import shutil

from baton import machine
from baton.runs.run import Run
from benchmarks.bench import Bench, parse_event
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import Event, Trace, watch
from benchmarks.table import Chart, Row, faster, keep
from benchmarks.theirs import Theirs

NAME = "restart"
TITLE = "lost process to the first step of the next one"
PHASES = ("fetch", "import", "build", "restore", "train")


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    run = ours.run(size, steps=1_000_000)
    columns: dict[str, list[float]] = {}
    splits: dict[str, dict[str, list[float]]] = {"imported already": {}, "fresh": {}}
    for _ in bench.rounds():
        for side, warm in (("imported already", "1"), ("fresh", "0")):
            split = _restart(bench, run, warm)
            keep(splits[side], split)
            keep(columns, {side: sum(split.values())})
            ours.rewind(run)
    return Row(
        title=TITLE,
        conditions=f"{size}; killed 20 s after its first step, nothing committed; one torch thread",
        preparation="neither side",
        figures=[
            faster("from its end to the next one's first step", columns["imported already"], columns["fresh"], "fresh")
        ],
        splits=splits,
        notes=["the pause before the next process, 2 s at first, is left out on both sides"],
        charts={"split": Chart.of_splits("Seconds from a lost process to the next one's first step", splits)},
    )


def _restart(bench: Bench, run: Run, warm: str) -> dict[str, float]:
    """Returns the seconds of each phase of the second process, from the end of the first one."""
    folder, lost = bench.fresh_folder("pod"), False

    def until(event: Event) -> bool:
        nonlocal lost
        lost = lost or event["event"] == "restarted"
        return lost and event["event"] == "step"

    command = ["-m", "benchmarks.pod", folder, "20", run.uri, "1"]
    try:
        trace = watch(
            command, parse_event, folder=folder, environment={**ENVIRONMENT, machine.FORKSERVER: warm}, until=until
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _split(trace)


def _split(trace: Trace) -> dict[str, float]:
    began = trace.at("restarted")
    later = [event for event in trace.events if event["at"] >= began]
    split: dict[str, float] = {}
    phase, since = "start", began
    for event in later:
        if (event["event"] == "phase" and event["phase"] in PHASES) or event["event"] == "step":
            split[phase] = split.get(phase, 0.0) + event["at"] - since
            phase, since = event.get("phase", ""), event["at"]
    return split
