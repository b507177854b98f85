"""A checkpoint's way from S3 into the trainer."""

from __future__ import annotations

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from benchmarks import OPPONENTS
from benchmarks.bench import Bench, best
from benchmarks.ours import Ours
from benchmarks.process import Trace
from benchmarks.sizes import Size
from benchmarks.table import Figure, Row, faster, keep, share
from benchmarks.theirs import Theirs

NAME = "restore"
TITLE = "checkpoint from S3 into the trainer, every byte and the state verified"


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.large
    run, uri = _committed(bench, ours, theirs, size)
    store = CheckpointStore(run)
    checkpoint = store.read(2)
    assert checkpoint
    columns: dict[str, list[float]] = {}
    splits: dict[str, dict[str, list[float]]] = {"ours": {}, "script": {}}
    raw_name = ""
    for _ in bench.rounds():
        chunk = ours.chunk(run, 2, until=lambda event: event.get("phase") == "train")
        script = theirs.process(uri, size, steps=4, target=4, until=lambda event: event["event"] == "restored")
        bench.touch_memory(size)
        alone = bench.transfer_down("fetch", run.uri, 2)
        raw = bench.raw_down(store.uri(checkpoint))
        raw_name = min(raw, key=lambda name: float(raw[name]["seconds"]))
        hashed = min(bench.transfer_down("raw_get", store.uri(checkpoint), n, "hashed")["seconds"] for n in (4, 8))
        their_get = bench.transfer_down("s3fs_get", store.uri(checkpoint))
        waited, restore = _waited(chunk), chunk.at("phase", phase="train") - chunk.at("phase", phase="restore")
        resume = script.at("restored") - script.at("built")
        keep(splits["ours"], {"fetch, alone": alone["seconds"], "fetch, waited for": waited, "restore": restore})
        their_fetch = {name: script.at("got") - script.at(name) for name in ("inputs", "imported")}
        keep(splits["script"], {"fetch, alone": their_fetch["inputs"], "restore": resume})
        keep(columns, {"alone": alone["seconds"] + restore, "waited": waited + restore})
        keep(columns, {"script": their_fetch["inputs"] + resume, "script waited": their_fetch["imported"] + resume})
        keep(columns, {"cpu": alone["cpu"], "busy": 100 * alone["busy"], "raw busy": 100 * raw[raw_name]["busy"]})
        if "Run:ai" in raw:
            keep(columns, {"Run:ai": checkpoint.bytes / 1e6 / raw["Run:ai"]["seconds"]})
        keep(columns, {"hashed": checkpoint.bytes / 1e6 / hashed})
        keep(columns, {"s3fs cpu": their_get["cpu"], "speed": checkpoint.bytes / 1e6 / alone["seconds"]})
        keep(
            columns, {"raw": checkpoint.bytes / 1e6 / best(raw), "s3fs": checkpoint.bytes / 1e6 / their_get["seconds"]}
        )
    return Row(
        title=TITLE,
        conditions=f"{size}; one torch thread on each side",
        preparation="neither side",
        figures=[
            faster("fetch alone + restore", columns["alone"], columns["script"], "script", at_least=3),
            faster("the same, as a chunk waits for it", columns["waited"], columns["script waited"], "script"),
            share("speed of fetch", columns["speed"], columns["raw"], "raw reader", unit="MB/s", at_least=0.9),
            share("speed of fetch", columns["speed"], columns["hashed"], "raw reader that hashes", unit="MB/s"),
            share("speed of fetch", columns["speed"], columns["s3fs"], "s3fs.get", unit="MB/s"),
            *(
                share("speed of fetch", columns["speed"], columns[name], "Run:ai's streamer", unit="MB/s")
                for name in ("Run:ai",)
                if name in columns
            ),
            Figure(
                what="busy cores of this machine meanwhile",
                unit="%",
                ours=columns["busy"],
                theirs=columns["raw busy"],
                other="raw reader",
            ),
            Figure(what="CPU of fetch", unit="s", ours=columns["cpu"], theirs=columns["s3fs cpu"], other="s3fs.get"),
        ],
        splits=splits,
        notes=[
            "a chunk fetches while it imports, so it waits for less than the whole fetch",
            "as a chunk waits: for its tokens as well, and so does the script",
            *theirs.notes(["script"]),
            "Run:ai's streamer reads the same files into memory and writes none"
            if "Run:ai" in columns
            else f"Run:ai's streamer: not measured: it is not in {OPPONENTS.name}; `make bench` installs it",
            f"raw reader: the fastest of several in each round, without hashes; in the last round {raw_name}",
            "a raw reader that hashes: the same with a SHA-256 of each part, for which nothing waits: what this "
            "machine allows a reader that checks what it got",
        ],
    )


def _committed(bench: Bench, ours: Ours, theirs: Theirs, size: Size) -> tuple[Run, str]:
    """Returns a run of each side with a checkpoint at step 2."""
    theirs.inputs(size)
    bench.server.expect(2 * size.bytes)
    run, uri = ours.run(size, steps=4, count=2), theirs.begin("restore")
    ours.chunk(run, 1)
    theirs.process(uri, size, steps=4, target=2)
    return run, uri


def _waited(chunk: Trace) -> float:
    """Returns the seconds in which a chunk did nothing but fetch, before its imports and after."""
    before = chunk.at("phase", phase="import") - chunk.at("phase", phase="fetch")
    return before + chunk.at("phase", phase="build") - chunk.at("phase", last=True, phase="fetch")
