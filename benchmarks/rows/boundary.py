"""From the last step of one chunk to the first step of the next."""

from __future__ import annotations

from functools import partial

from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from benchmarks.bench import Bench, best, parse_mark
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import Trace, watch
from benchmarks.sizes import Size
from benchmarks.table import Chart, Row, keep, share
from benchmarks.theirs import Theirs

NAME = "boundary"
TITLE = "gap between two chunks, each a fresh process"
TARGET, STEPS = 2, 4


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size = bench.options.large
    theirs.inputs(size)
    modules, kinds = ours.modules(), theirs.kinds()
    splits: dict[str, dict[str, list[float]]] = {name: {} for name in ("ours", *kinds, "floor")}
    totals: dict[str, list[float]] = {}
    for _ in bench.rounds():
        bench.server.expect(size.bytes)
        bench.touch_memory(size)
        run, split = _ours(ours, size)
        floor = {
            "import": watch(["-m", "benchmarks.imports", modules], parse_mark, environment=ENVIRONMENT).seconds,
            "fetch": best(bench.raw_down(_checkpoint(run))),
        }
        ours.rewind(run)
        bench.touch_memory(size)
        floor["upload"] = bench.raw_up(bench.payload(size), "boundary")
        found = {"ours": split, "floor": floor}
        for kind in kinds:
            bench.server.expect(size.bytes)
            bench.touch_memory(size)
            found[kind] = _theirs(theirs, size, kind)
        for name, parts in found.items():
            keep(splits[name], parts)
            keep(totals, {name: sum(parts.values())})
    goals = {"script": 0.5, "floor": 1.25}
    return Row(
        title=TITLE,
        conditions=f"{size}; one torch thread on each side; the next process starts when the previous one has exited",
        preparation="neither side",
        figures=[
            share("chunk boundary", totals["ours"], totals[name], name, unit="s", at_most=goals.get(name))
            for name in (*kinds, "floor")
        ],
        splits=splits,
        charts={"split": Chart.of_splits("Seconds between two chunks", splits)},
        notes=[
            "floor: a process that imports what a chunk imports and exits, and the checkpoint's bytes up and down by "
            "the fastest raw client, one after the other",
            *theirs.notes(),
            "all sides fetch their tokens and the checkpoint from the store; tokens are made beforehand",
            "free memory is touched before each side: a virtual machine has to wait for what its host took back",
            "start: until a chunk's own code runs; on the other sides it is part of the imports",
            "rclone reads a checkpoint while it is restored, and its process may go once all files are uploaded",
        ],
    )


def _ours(ours: Ours, size: Size) -> tuple[Run, dict[str, float]]:
    """Returns a run whose first chunk is done, and the parts of the boundary after it."""
    run = ours.run(size, steps=STEPS, count=2)
    first = ours.chunk(run, 1)
    then = ours.chunk(run, 2, until=lambda event: event.get("phase") == "train")
    split = {"save": _saved(first) - first.at("step", step=TARGET), "upload": first.at("checkpoint") - _saved(first)}
    split |= {"exit": first.ended - first.at("checkpoint"), "start": _phase(then, "fetch") - then.spawned}
    look = _phase(then, "import") - _phase(then, "fetch")
    fetch_again = then.at("phase", last=True, phase="fetch")
    split |= {"import": fetch_again - _phase(then, "import"), "fetch": look + _phase(then, "build") - fetch_again}
    split |= {"build": _phase(then, "restore") - _phase(then, "build")}
    split |= {"restore": _phase(then, "train") - _phase(then, "restore")}
    return run, split


def _checkpoint(run: Run) -> str:
    """Returns the address of the checkpoint of a run's first chunk."""
    store = CheckpointStore(run)
    checkpoint = store.read(TARGET)
    assert checkpoint
    return store.uri(checkpoint)


def _saved(trace: Trace) -> float:
    """Returns when a chunk's training thread had its last checkpoint staged."""
    return trace.at("phase", last=True, phase="train")


def _phase(trace: Trace, phase: str) -> float:
    return trace.at("phase", phase=phase)


def _theirs(theirs: Theirs, size: Size, kind: str) -> dict[str, float]:
    uri, run = theirs.begin("boundary"), partial(theirs.process, size=size, kind=kind, steps=STEPS)
    first = run(uri, target=TARGET)
    then = run(uri, target=STEPS, until=lambda event: event["event"] == "restored")
    if then.all("restored")[0]["step"] != TARGET:
        raise RuntimeError(f"{kind} has restored step {then.all('restored')[0]['step']}, not {TARGET}")
    theirs.begin("boundary")
    return {
        "save": first.at("saved") - first.at("step", step=TARGET),
        "upload": first.at("put") - first.at("saved"),
        "exit": first.ended - first.at("put"),
        "import": then.at("imported") - then.spawned,
        "fetch": then.at("got") - then.at("imported"),
        "build": then.at("built") - then.at("got"),
        "restore": then.at("restored") - then.at("built"),
    }
