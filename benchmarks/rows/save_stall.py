"""What a checkpoint costs the training that it interrupts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from benchmarks.bench import Bench
from benchmarks.ours import Ours, every_step
from benchmarks.process import Event, Trace
from benchmarks.sizes import Size
from benchmarks.table import Chart, Figure, Row, faster, keep
from benchmarks.theirs import Theirs

NAME = "save-stall"
TITLE = "training with checkpoints and without"


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    size, every = bench.options.large, 2 if bench.options.quick else 8
    last = 3 * every
    steps = last - every
    columns: dict[str, list[float]] = {}
    sides = ["ours", *theirs.kinds()]
    for _ in bench.rounds():
        for side in sides:
            if side == "ours":
                plain, saving = _ours(bench, ours, size, every, last)
                stalls = _stalls(saving)
                if uploads := [event["seconds"]["upload"] for event in saving.all("checkpoint")]:
                    keep(columns, {"upload": sum(uploads) / len(uploads)})
            else:
                plain, saving = (_theirs(bench, theirs, size, side, n, last) for n in (None, every))
                stalls = _their_stalls(saving)
            seconds = {name: every_step(trace, every, last) for name, trace in (("plain", plain), ("saving", saving))}
            keep(columns, {f"{side} step": seconds["plain"] / steps, f"{side} saves": len(stalls)})
            keep(columns, {f"{side} extra": 100 * (seconds["saving"] / seconds["plain"] - 1)})
            keep(columns, {f"{side} stall": sum(stalls) / len(stalls)})
            keep(columns, {f"{side} share": 100 * sum(stalls) / seconds["plain"]})
    return Row(
        title=TITLE,
        conditions=f"{size}; one torch thread on each side; a checkpoint every {every} steps; {steps} steps of "
        f"{median(columns['ours step']):.2f} s measured",
        preparation="neither side",
        figures=[
            *(figure for kind in sides[1:] for figure in _figures(columns, kind)),
            Figure(what="upload during training", unit="s", ours=columns.get("upload", [])),
            Figure(what="checkpoints measured", unit="", ours=columns["ours saves"]),
        ],
        charts={
            "extra": Chart(
                title="Time that checkpoints add to training",
                unit="%",
                bars={
                    f"{side}, {what}": {"extra": median(columns[f"{side} {name}"])}
                    for side in sides
                    for what, name in (("the stall", "share"), ("in all", "extra"))
                },
            )
        },
        notes=[
            "extra time: of the same steps with checkpoints and without, in two processes; it contains the stall, and "
            "the processor time and memory that the upload takes from the trainer",
            "stall: from the end of a step until training continues; it contains a wait for an earlier upload",
            *theirs.notes(),
            "here the trainer has one of the machine's cores to itself; where a GPU trains, the host's cores are free",
        ],
    )


def _figures(columns: Mapping[str, list[float]], kind: str) -> list[Figure]:
    """Returns ours against another side; goals are for the script."""
    is_goal = kind == "script"

    def sides(name: str) -> tuple[list[float], list[float], str]:
        return columns[f"ours {name}"], columns[f"{kind} {name}"], kind

    extra, their_extra, _ = sides("extra")
    at_most = 3.5 if is_goal else None
    return [
        Figure(what="extra time per step", unit="%", ours=extra, theirs=their_extra, other=kind, at_most=at_most),
        faster("stall per checkpoint", *sides("stall"), at_least=20 if is_goal else None),
        faster("step without checkpoints", *sides("step"), at_least=0.99 if is_goal else None),
    ]


def _ours(bench: Bench, ours: Ours, size: Size, every: int, last: int) -> tuple[Trace, Trace]:
    """Trains without checkpoints and with them."""
    run = ours.run(size, steps=last)
    plain = ours.chunk(run, 1, until=_ends(last))
    bench.server.expect(3 * size.bytes)
    run = ours.run(size, steps=last, every=every)
    saving = ours.chunk(run, 1, until=_ends(last))
    ours.rewind(run)
    return plain, saving


def _theirs(bench: Bench, theirs: Theirs, size: Size, kind: str, every: int | None, last: int) -> Trace:
    bench.server.expect(3 * size.bytes)
    uri = theirs.begin("stall")
    trace = theirs.process(uri, size, kind=kind, steps=last, target=last, every=every, until=_ends(last))
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
    return [event["at"] - trace.at("step", step=event["step"]) for event in trace.all("saved")]
