"""A checkpoint's way to S3."""

from __future__ import annotations

import statistics

from benchmarks.bench import Bench, best
from benchmarks.ours import Ours
from benchmarks.process import Event
from benchmarks.table import Figure, Row, share
from benchmarks.theirs import Theirs

NAME = "publish"
TITLE = "a checkpoint's files to S3, hashed on their way"


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, sides = bench.options.large, ("send", "s3fs_put")
    folder = bench.payload(size)
    found: dict[str, list[Event]] = {side: [] for side in sides}
    raw: list[dict[str, Event]] = []
    for _ in bench.rounds():
        for side in sides:
            bench.server.expect(size.bytes)
            found[side].append(bench.transfer(side, folder, f"{bench.server.uri}/publish"))
            bench.server.clear("publish")
        raw.append(bench.raw_up(folder, "publish"))
    speed = {side: [size.bytes / 1e6 / event["seconds"] for event in found[side]] for side in sides}
    limit = [size.bytes / 1e6 / best(writers) for writers in raw]
    cpu = {side: [event["cpu"] for event in found[side]] for side in sides}
    fastest = [min(writers.values(), key=lambda event: float(event["seconds"])) for writers in raw]
    headroom = statistics.median(a / b for a, b in zip(limit, speed["s3fs_put"], strict=True))
    void = ""
    if headroom < 2:
        void = f"against s3fs.put the server is the limit: the raw writer is only {headroom:.2f}× as fast as it"
    return Row(
        title=TITLE,
        conditions=f"{size.bytes / 1e6:.0f} MB in two files in memory, removed from the server after each time",
        preparation="neither side",
        figures=[
            share("speed of send", speed["send"], limit, "raw writer", unit="MB/s", at_least=0.8),
            share("speed of send", speed["send"], speed["s3fs_put"], "s3fs.put", unit="MB/s", at_least=2, void=void),
            Figure(
                what="CPU of send",
                unit="s",
                ours=cpu["send"],
                theirs=[event["cpu"] for event in fastest],
                other="raw writer",
            ),
            Figure(what="CPU of send", unit="s", ours=cpu["send"], theirs=cpu["s3fs_put"], other="s3fs.put"),
        ],
        notes=[
            "raw writer: the faster of obstore (parts of 16 MB, four at a time per file) and boto3, without hashes",
            "training does not wait for any of this: what it waits for is the stall in row save-stall",
        ],
    )
