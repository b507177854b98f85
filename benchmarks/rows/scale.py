"""The plan of a large sweep, by simulation; `benchmarks.scaling` has the whole tables of docs/internals/scale.md."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.bench import Bench
from benchmarks.ours import Ours
from benchmarks.simulating import HOUR, POLICIES, Setting, simulate
from benchmarks.table import Figure, Row
from benchmarks.theirs import Theirs

NAME = "scale"
TITLE = "1,000 trials of 20 chunks on 64 GPUs, simulated: makespan over what no order can beat"
WHOLE = Setting(preemptions=0.5)
HALVED = replace(WHOLE, keep=0.5, eta=2)


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    share = 10 if bench.options.quick else 1
    figures = []
    for what, setting, goal in (("all to the end", WHOLE, 1.25), ("halving, eta 2", HALVED, 1.5)):
        chosen = replace(setting, trials=setting.trials // share, gpus=max(setting.gpus // share, 1))
        found = {name: [simulate(chosen, policy, seed) for seed in range(3)] for name, policy in POLICIES.items()}
        barriers, others = found["barriers"], found["asynchronous"]
        figures.append(
            Figure(
                what=what,
                unit="h",
                ours=[one.makespan / HOUR for one in barriers],
                theirs=[one.makespan / HOUR for one in others],
                other="without barriers",
                ratio=[one.ratio for one in barriers],
                at_most=goal,
            )
        )
    return Row(
        title=TITLE,
        conditions=f"chunks of {WHOLE.chunk:.0f} s, {WHOLE.preemptions} preemptions per GPU-hour, three seeds",
        preparation="no other side",
        figures=figures,
        notes=["the ratio is ours over the bound: all chunks over all GPUs, or the longest chain"],
    )
