"""What a checkpoint costs the training that it interrupts."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.bench import Bench
from benchmarks.ours import Ours, every_step
from benchmarks.process import Event, Trace
from benchmarks.sizes import Size
from benchmarks.table import Chart, Figure, Row, faster, keep
from benchmarks.theirs import Theirs

NAME = "save-stall"
TITLE = "training with checkpoints, without, and with synchronous saves"


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, every = bench.options.large, 2 if bench.options.quick else 8
    last = 3 * every
    steps = last - every
    columns: dict[str, list[float]] = {}
    for _ in bench.rounds(dear=True):
        plain, saving = _ours(bench, ours, size, every, last)
        script = _theirs(bench, theirs, size, every, last)
        stalls, their_stalls = _stalls(saving), _their_stalls(script)
        seconds = {name: every_step(trace, every, last) for name, trace in (("plain", plain), ("saving", saving))}
        whole = every_step(script, every, last)
        keep(columns, {"step": seconds["plain"] / steps, "script step": (whole - sum(their_stalls)) / steps})
        keep(columns, {"extra": 100 * (seconds["saving"] / seconds["plain"] - 1)})
        keep(columns, {"script extra": 100 * sum(their_stalls) / (whole - sum(their_stalls))})
        keep(columns, {"stall": sum(stalls) / len(stalls), "script stall": sum(their_stalls) / len(their_stalls)})
        keep(columns, {"share": 100 * sum(stalls) / seconds["plain"], "saves": len(stalls)})
        if uploads := [event["seconds"]["upload"] for event in saving.all("checkpoint")]:
            keep(columns, {"upload": sum(uploads) / len(uploads)})
    return Row(
        title=TITLE,
        conditions=f"{size}; one torch thread on each side; a checkpoint every {every} steps; {steps} steps of "
        f"{sum(columns['step']) / len(columns['step']):.2f} s measured",
        figures=[
            Figure(
                what="extra time per step",
                unit="%",
                ours=columns["extra"],
                theirs=columns["script extra"],
                other="script",
                at_most=3.5,
            ),
            Figure(what="of it the stall", unit="%", ours=columns["share"]),
            faster("stall per checkpoint", columns["stall"], columns["script stall"], "script", at_least=20),
            faster("step without checkpoints", columns["step"], columns["script step"], "script", at_least=0.99),
            Figure(what="upload during training", unit="s", ours=columns.get("upload", [])),
            Figure(what="checkpoints measured", unit="", ours=columns["saves"]),
        ],
        charts={
            "extra": Chart(
                title="Time that checkpoints add to training",
                unit="%",
                bars={
                    "ours, the stall": {"extra": median(columns["share"])},
                    "ours, in all": {"extra": median(columns["extra"])},
                    "script": {"extra": median(columns["script extra"])},
                },
            )
        },
        notes=[
            "extra time: of the same steps with checkpoints and without, in two processes; it holds, besides the "
            "stall, what the upload takes from the trainer's core and memory",
            "stall: from the end of a step until training continues; the script's holds its put",
            "here the trainer has one of the machine's cores to itself; where a GPU trains, the host's cores are free",
        ],
    )


def _ours(bench: Bench, ours: Ours, size: Size, every: int, last: int) -> tuple[Trace, Trace]:
    """Trains without checkpoints and with them."""
    run = ours.run(size, steps=last)
    plain = ours.chunk(run, 1, until=_ends(last))
    bench.server.expect(3 * size.bytes)
    run = ours.run(size, steps=last, every=every)
    saving = ours.chunk(run, 1, until=_ends(last))
    ours.rewind(run)
    return plain, saving


def _theirs(bench: Bench, theirs: Theirs, size: Size, every: int, last: int) -> Trace:
    bench.server.expect(3 * size.bytes)
    uri = theirs.begin("stall")
    trace = theirs.process(uri, size, steps=last, target=last, every=every, until=_ends(last))
    theirs.begin("stall")
    return trace


def _ends(step: int) -> Callable[[Event], bool]:
    """Tells the end of a step, before its checkpoint is taken."""
    return lambda event: event["event"] == "step" and event["step"] == step


def _stalls(trace: Trace) -> list[float]:
    """Returns the seconds from the end of a step to the end of its save, for each checkpoint before the last step."""
    ends = {event["step"]: event["at"] for event in trace.all("step")}
    goes_on = [event["at"] for event in trace.all("phase", phase="train")]
    return [
        next(at for at in goes_on if at > event["at"]) - ends[event["step"]]
        for event in trace.all("phase", phase="save")
        if any(at > event["at"] for at in goes_on)
    ]


def _their_stalls(trace: Trace) -> list[float]:
    return [event["at"] - trace.at("step", step=event["step"]) for event in trace.all("put")]
