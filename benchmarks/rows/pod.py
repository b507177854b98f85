"""From the start of a pod's container to the end of a chunk's first step, with the image on the disk alone."""

from __future__ import annotations

import statistics

from benchmarks import cluster
from benchmarks.bench import Bench
from benchmarks.cluster import Cluster
from benchmarks.ours import Ours
from benchmarks.process import Trace
from benchmarks.table import Chart, Figure, Row, faster, keep
from benchmarks.theirs import Theirs

NAME = "pod"
TITLE = "from the start of a pod's container to the end of a chunk's first step"
THREADS = 8


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.small
    run = ours.run(size, steps=4)
    columns: dict[str, list[float]] = {}
    splits: dict[str, dict[str, list[float]]] = {"read ahead": {}, "as it comes": {}, "in memory": {}}
    with Cluster() as pods:
        for _ in bench.rounds(dear=True):
            cluster.forget_files()
            found = pods.read(THREADS)
            keep(columns, {"disk": found["seconds"], "MB": found["bytes"] / 1e6})
            for side in splits:
                if side != "in memory":
                    cluster.forget_files()
                trace = pods.chunk(run, is_listed=side != "as it comes")
                ours.rewind(run)
                split = _split(trace)
                keep(splits[side], split)
                keep(columns, {side: sum(split.values()), "kubelet": trace.at("container") - trace.spawned})
    least = [max(disk, memory) for disk, memory in zip(columns["disk"], columns["in memory"], strict=True)]
    ahead = columns["read ahead"]
    return Row(
        title=TITLE,
        conditions=f"{size}; a pod on the cluster of KUBECONFIG, one torch thread, nothing in the kernel's cache",
        figures=[
            faster("container's start to first step", ahead, columns["as it comes"], "files read as it comes"),
            _bounded("the same beside the disk", ahead, columns["disk"], "the disk for those bytes"),
            _bounded("the same beside disk or processor", ahead, least, "the longer of both"),
        ],
        splits=splits,
        notes=[
            f"those bytes: {statistics.median(columns['MB']):.0f} MB, read by {THREADS} threads in a pod of their own",
            "the processor: the same start with all files in the kernel's cache",
            f"a pod until its container's first process: {statistics.median(columns['kubelet']):.1f} s, left out",
        ],
        charts={"split": Chart.of_splits("Seconds from a container's start to the end of the first step", splits)},
    )


def _bounded(what: str, ours: list[float], bound: list[float], other: str) -> Figure:
    ratio = [mine / least for mine, least in zip(ours, bound, strict=True)]
    return Figure(what=what, unit="s", ours=ours, theirs=bound, other=other, ratio=ratio, at_most=1.3)


def _split(trace: Trace) -> dict[str, float]:
    fetch, build = trace.at("phase", phase="fetch"), trace.at("phase", phase="build")
    return {
        "start": fetch - trace.at("container"),
        "import and fetch": build - fetch,
        "build": trace.at("phase", phase="restore") - build,
        "first step": trace.at("step") - trace.at("phase", phase="restore"),
    }
