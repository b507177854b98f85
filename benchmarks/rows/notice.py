"""From a preemption's notice to a checkpoint in the store."""

from __future__ import annotations

from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.process import Event, Trace
from benchmarks.table import Figure, Row, keep
from benchmarks.theirs import Theirs

NAME = "notice"
TITLE = "SIGTERM during training to a checkpoint in the store"
ENDLESS, AT = 1_000_000, 6
"""More steps than a process comes to, and the step at whose end it is told."""


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    columns: dict[str, list[float]] = {}
    sizes = list(dict.fromkeys((bench.options.small, bench.options.large)))
    for size in sizes:
        theirs.inputs(size)
    for _ in bench.rounds():
        for size in sizes:
            bench.server.expect(2 * size.bytes)
            run = ours.run(size, steps=ENDLESS, count=2)
            uri = theirs.begin("notice")
            sides = {
                "ours": (ours.chunk(run, 1, terminate=_is_due), "checkpoint"),
                "JIT": (theirs.process(uri, size, kind="JIT", steps=ENDLESS, target=ENDLESS, terminate=_is_due), "put"),
            }
            for side, (trace, stored) in sides.items():
                keep(columns, {f"{side} {size.name}": trace.at(stored, last=True) - trace.terminated})
                keep(columns, {f"{side} {size.name} lost": float(_lost(trace, stored))})
            ours.rewind(run)
            theirs.begin("notice")
    return Row(
        title=TITLE,
        conditions=f"{'; '.join(map(str, sizes))}; SIGTERM after step {AT}; one torch thread on each side",
        preparation="neither side",
        figures=[
            Figure(
                what=f"{what}, {size.name}",
                unit=unit,
                ours=columns[f"ours {size.name}{end}"],
                theirs=columns[f"JIT {size.name}{end}"],
                other="JIT",
            )
            for size in sizes
            for what, unit, end in (("notice to checkpoint", "s", ""), ("steps trained and lost", "", " lost"))
        ],
        notes=[
            *theirs.notes(["JIT"]),
            "`enable_jit_checkpoint` waits three seconds before it saves, and saves to a folder; the script uploads it",
            "Kubeflow Pipelines' launcher dies at SIGTERM, and its pod is gone about a second later: there, periodic "
            "checkpoints count",
        ],
    )


def _is_due(event: Event) -> bool:
    return event["event"] == "step" and event["step"] == AT


def _lost(trace: Trace, stored: str) -> int:
    """Returns the steps that a process trained after its last checkpoint."""
    return int(trace.all("step")[-1]["step"] - trace.all(stored)[-1]["step"])
