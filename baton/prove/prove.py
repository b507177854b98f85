"""`baton verify chunks`: a recipe run once per number of chunks, in fresh processes, compared byte for byte.

With virtual workers, chunks may take turns between numbers of processes.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from baton.checkpoint import seals
from baton.checkpoint.store import CheckpointStore
from baton.errors import BatonError, UserError
from baton.events import Event
from baton.kfp.processes import train_chunk
from baton.local import forkserver
from baton.local.begun import begin
from baton.models import trained
from baton.pages import html, plots
from baton.pages.plots import Curve, Mark, Plot
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import objects
from baton.runs.documents import OwnState
from baton.runs.run import Run, now


def parse_processes(text: str | None, recipe: Recipe) -> list[int]:
    """Returns the numbers in `1,2,4`; raises `UserError` if the recipe's virtual workers cannot be shared so."""
    if text is None:
        return []
    workers = recipe.parallel.virtual_workers
    if workers is None:
        raise UserError(
            f"--processes {text!r}: bits differ with another number of processes, but for virtual workers.",
            remedy="Set training.parallel.virtual_workers, or leave --processes out.",
        )
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if any(number < 1 or workers % number for number in numbers):
        raise UserError(f"--processes {text!r} is not a list of numbers that divide the {workers} virtual workers.")
    return numbers


def set_num_processes(run: Run, recipe: Recipe, processes: int) -> None:
    """Has so many processes train a run's next chunk."""
    with seals.stage(run, objects.ADOPT):
        run.create(load.with_values(recipe, {"training.parallel.processes": processes}))


_WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")


class RunSummary(TypedDict):
    """Result of a finished run, as a page shows it."""

    run: str
    uri: str
    targets: list[int]
    steps: list[int]
    losses: list[float]
    weights_sha256: str
    state_digest: str


class FinishedRun(RunSummary):
    """A finished run: also the parts of its last state with their digests, and its machine's fingerprint."""

    chunks: int
    parts: Mapping[str, str]
    hooks: NotRequired[OwnState | None]
    fingerprint: Mapping[str, object]


class Difference(TypedDict):
    """The earliest difference of the run in `chunks` chunks from the one in `against`."""

    chunks: int
    against: int
    what: str
    expected: float | str
    found: float | str
    logged_value: NotRequired[int]
    step: NotRequired[int]
    hooks: NotRequired[list[str]]
    """State of the user's code that differs or is not carried."""


class Variant(RunSummary):
    """A run of a proof, with its difference from the first one."""

    chunks: int
    difference: Difference | None


class ProofResult(TypedDict):
    """Result of a proof: `processes` took turns from chunk to chunk; `report` is the page's path."""

    recipe: str
    created: str
    leave_out: list[str]
    processes: list[int]
    exact: bool
    variants: list[Variant]
    first_difference: Difference | None
    fingerprint: Mapping[str, object]
    report: NotRequired[str]


def prove(
    recipe: Recipe,
    counts: Sequence[int],
    *,
    name: str,
    leave_out: Sequence[str] = (),
    processes: Sequence[int] = (),
    on_event: Callable[[Event], None] = lambda event: None,
    on_run: Callable[[int], None] = lambda count: None,
) -> ProofResult:
    """Runs a recipe, its paths absolute, once per count of chunks and compares losses and digests with the first.

    `name` begins the runs' names. `on_run` is called with the number of chunks before each run. `leave_out` is not
    restored, as a negative control. `processes` are numbers of processes that take turns from chunk to chunk. Raises
    the `BatonError` of a process that failed.
    """
    created = now()
    variants, launch = [], forkserver.launcher()
    for count in counts:
        on_run(count)
        document = recipe.model_dump(mode="json")
        document["chunks"]["count"] = count
        document["tracking"]["mlflow"] = None
        chunked = load.validate(document, origin=recipe.name)
        run = begin(chunked, f"{name}-k{count}", on_event, launch)
        for index in range(1, count + 1):
            if processes:
                set_num_processes(run, chunked, processes[(index - 1) % len(processes)])
            train_chunk(run.uri, index, on_event, launch, leave_out)
        variants.append(outcome(run, count))
    return compare(variants, recipe=recipe.name, created=created, leave_out=leave_out, processes=processes)


def compare(
    variants: Sequence[FinishedRun],
    *,
    recipe: str,
    created: str,
    leave_out: Sequence[str] = (),
    processes: Sequence[int] = (),
) -> ProofResult:
    """Compares runs that have ended with the first of them; see `prove` for the rest."""
    differences = [difference(variants[0], variant) for variant in variants]
    differing = [difference for difference in differences if difference]
    return {
        "recipe": recipe,
        "created": created,
        "leave_out": [str(part) for part in leave_out],
        "processes": list(processes),
        "exact": not differing,
        "variants": [
            {"chunks": row["chunks"], **summary(row), "difference": each}
            for row, each in zip(variants, differences, strict=True)
        ],
        "first_difference": min(
            # By the step where it shows; comparisons at the end come last.
            differing,
            key=lambda difference: float(difference.get("logged_value", math.inf)),
            default=None,
        ),
        "fingerprint": variants[0]["fingerprint"],
    }


def outcome(run: Run, count: int) -> FinishedRun:
    """Returns a finished run's losses and last checkpoint; raises `BatonError` if it has not ended."""
    store, plan = CheckpointStore(run), run.plan()
    checkpoint = trained.final_checkpoint(run)
    losses = {int(entry["step"]): entry["loss"] for entry in store.history(checkpoint) if "loss" in entry}
    return {
        "chunks": count,
        "run": run.name,
        "uri": run.uri,
        "targets": list(plan.targets),
        "steps": sorted(losses),
        "losses": [losses[step] for step in sorted(losses)],
        "weights_sha256": weights_sha256(checkpoint.manifest.files),
        "state_digest": checkpoint.digest,
        "parts": checkpoint.meta.state,
        "hooks": checkpoint.meta.hooks,
        "fingerprint": checkpoint.meta.fingerprint.to_json(),
    }


def weights_sha256(files: Mapping[str, Mapping[str, object]]) -> str:
    """Returns the SHA-256 of a manifest's weights file; for several files, that of `sha256sum`'s output."""
    names = sorted(name for name in files if _WEIGHTS.fullmatch(name))
    if not names:
        raise BatonError(f"the last checkpoint holds no weights file, only {', '.join(sorted(files)) or 'nothing'}.")
    digests = [str(files[name]["sha256"]) for name in names]
    lines = "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))
    return digests[0] if len(names) == 1 else hashlib.sha256(lines.encode()).hexdigest()


def summary(outcome: FinishedRun) -> RunSummary:
    """Returns the part of a run that pages show: neither its machine nor the parts of its state."""
    return cast(RunSummary, {name: outcome[name] for name in RunSummary.__annotations__})  # type: ignore[literal-required]


def difference(first: FinishedRun, other: FinishedRun) -> Difference | None:
    """Returns the earliest difference of a variant from the first, if any."""
    for number, (expected, found) in enumerate(zip(first["losses"], other["losses"], strict=False), 1):
        if repr(expected) != repr(found):  # a loss that is not a number equals itself by its digits only
            step = other["steps"][number - 1]
            return _differing(first, other, "loss", expected, found) | {"logged_value": number, "step": step}
    if len(first["losses"]) != len(other["losses"]):
        return _differing(first, other, "number of losses", len(first["losses"]), len(other["losses"]))
    for part in dict.fromkeys([*first["parts"], *other["parts"]]):
        ours, theirs = (row["parts"].get(part, "none") for row in (first, other))
        if ours != theirs:
            return _differing(first, other, part, ours, theirs)
    if first["weights_sha256"] != other["weights_sha256"]:
        return _differing(first, other, "weights file", first["weights_sha256"], other["weights_sha256"])
    return None


def _differing(
    first: FinishedRun, other: FinishedRun, what: str, expected: float | str, found: float | str
) -> Difference:
    told: Difference = {
        "chunks": other["chunks"],
        "against": first["chunks"],
        "what": what,
        "expected": expected,
        "found": found,
    }
    ours, theirs = (row.get("hooks") or OwnState() for row in (first, other))
    kept = sorted({*ours.carried, *theirs.carried})
    hooks = [f"state of `{x}` differs" for x in kept if ours.carried.get(x) != theirs.carried.get(x)]
    hooks += [f"state of `{name}` is not carried: {why}" for name, why in {**ours.lost, **theirs.lost}.items()]
    return {**told, "hooks": hooks} if hooks else told


def parse_counts(text: str) -> list[int]:
    """Returns the numbers in `1,2,5`; raises `UserError` unless they are two or more, positive, each once."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if len(counts) < 2 or len(set(counts)) < len(counts) or min(counts) < 1:
        raise UserError(f"--chunks {text!r} is not a list of at least two different numbers above 0, such as 1,2,5.")
    return counts


def print_table(proof: ProofResult) -> None:
    """Prints a proof for people."""
    for variant in proof["variants"]:
        print(
            f"{variant['chunks']:>3} chunk(s)  last loss {last_loss(variant)}  "
            f"weights {variant['weights_sha256'][:16]}  state {variant['state_digest'][:16]}"
        )
    print(verdict(proof))
    if told := difference_text(proof):
        print(told["sentence"])
        for label, value in told["values"]:
            if value is not None:
                print(f"  {label}: {value}")
    if told_control := control(proof["leave_out"], exact=proof["exact"]):
        print(told_control)
    print(f"report: {proof['report']}")


def last_loss(variant: RunSummary) -> str:
    """Returns every digit of the last loss that a variant logged."""
    return repr(variant["losses"][-1]) if variant["losses"] else "none logged"


MAX_STRIPES = 4
"""Curves that share the length of a line; with more, the dashes would be too far apart to follow."""


def render(proof: ProofResult, kills: Sequence[tuple[int, int]] = (), report: str = "") -> str:
    """Returns the page as one HTML document, which loads nothing.

    Args:
        proof: The comparison.
        kills: Steps at which the last run was killed, and those that it resumed from.
        report: Address of that run's report.
    """
    environment = html.environment(Path(__file__).parent)
    environment.filters |= {"last_loss": last_loss}
    first = proof["variants"][0]
    return environment.get_template("prove.html.j2").render(
        proof=proof,
        first=first,
        first_name=named(first),
        tone=tone(proof),
        verdict=verdict(proof),
        control=control(proof["leave_out"], exact=proof["exact"]),
        difference=difference_text(proof),
        rows=[(variant, *compared(variant)) for variant in proof["variants"]],
        chunk_counts=listed([f"{variant['chunks']:,}" for variant in proof["variants"]]),
        num_losses=html.count(len(first["losses"]), "logged loss", "logged losses"),
        num_hidden=sum(not math.isfinite(loss) for variant in proof["variants"] for loss in variant["losses"]),
        loss=loss_plot(proof, kills),
        kills=kills,
        report=report,
        drift=drift_plot(proof),
        chunk_ends=chunk_ends(proof),
    )


def verdict(proof: ProofResult) -> str:
    """Returns the line that sums the comparison up."""
    variants = proof["variants"]
    if proof["exact"]:
        return f"exact: all {len(variants)} runs are the same, byte for byte"
    differing = sum(variant["difference"] is not None for variant in variants)
    verb = "differs" if differing == 1 else "differ"
    return f"NOT exact: {differing} of {len(variants)} runs {verb} from the run in {named(variants[0])}"


def tone(proof: ProofResult) -> str:
    """Returns good, warn or bad. A control is never good news."""
    return "warn" if proof["leave_out"] else "good" if proof["exact"] else "bad"


def is_as_expected(leave_out: Sequence[str], *, exact: bool) -> bool:
    """Whether runs are equal, or differ where a negative control has left a part out."""
    return exact != bool(leave_out)


NEEDS = {"rng": "draws random numbers, e.g. with adapter.dropout=0.1", "hooks": "carries state of your own code"}


def control(leave_out: Sequence[str], *, exact: bool) -> str:
    """Returns a negative control and whether it found anything; empty where nothing was left out."""
    if not leave_out:
        return ""
    parts = listed(leave_out)
    setup = f"Negative control: {parts} was not restored, so the runs should differ."
    if not exact:
        return f"{setup} They do: the comparison detects the missing part."
    needs = listed([NEEDS.get(part, f"depends on {part}") for part in leave_out])
    return f"{setup} They do not, so this control proves nothing. Use a recipe that {needs}."


def named(variant: Variant) -> str:
    """Returns `1 chunk`, `5 chunks`."""
    return html.count(variant["chunks"], "chunk")


def listed(words: Sequence[str]) -> str:
    """Returns `1, 2 and 5`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def compared(variant: Variant) -> tuple[str, str]:
    """Returns a tone and a few words for a run compared with the first."""
    difference = variant["difference"]
    if difference is None:
        return "good", "✓ the same"
    place = f" at value {difference['logged_value']:,}" if "logged_value" in difference else ""
    return "bad", f"✗ {difference['what']}{place}"


def difference_text(proof: ProofResult) -> dict[str, Any] | None:
    """Returns the first difference in words, if any: a sentence, and lines with a name and a value or None."""
    difference = proof["first_difference"]
    if difference is None:
        return None
    first = proof["variants"][0]
    other = next(variant for variant in proof["variants"] if variant["chunks"] == difference["chunks"])
    runs = f"The run in {named(other)} differs from the run in {named(first)}"
    losses = html.count(len(first["losses"]), "logged loss", "logged losses")
    if difference["what"] == "loss":
        number, step = difference["logged_value"], difference["step"]
        chunk = next(index for index, end in enumerate(other["targets"], 1) if step <= end)
        place = f"value {number:,} of {losses}: step {step:,}, in chunk {chunk} of {other['chunks']}"
        before = f"The {html.count(number - 1, 'loss', 'losses')} before it {'is' if number == 2 else 'are'} the same."
        sentence = f"{runs} in the loss, first at {place}. {before if number > 1 else ''}"
    elif difference["what"] == "number of losses":
        sentence = f"{runs} in the number of losses it logged; those that both have are the same."
    elif difference["what"] == "weights file":
        sentence = f"{runs} in the weights file. The losses and every part of the last state are the same."
    else:
        part = difference["what"]
        sentence = f"{runs} in the last state, first in the part “{part}”. The {losses} are the same."
    if hooks := "; ".join(difference.get("hooks", ())):
        sentence = f"{sentence.strip()} {hooks[:1].upper()}{hooks[1:]}."
    values = {"expected": repr(difference["expected"]), "found": repr(difference["found"])}
    if isinstance(difference["expected"], str):
        values = {"expected": difference["expected"], "found": str(difference["found"])}
    gap = float(difference["found"]) - float(difference["expected"]) if difference["what"] == "loss" else math.nan
    return {
        "sentence": sentence.strip(),
        "values": [
            (f"Expected, as in {named(first)}", values["expected"]),
            (f"Found in {named(other)}", values["found"]),
            ("Found less expected", f"{gap:+.3g}" if math.isfinite(gap) else None),
        ],
    }


def loss_plot(proof: ProofResult, kills: Sequence[tuple[int, int]] = ()) -> Plot | None:
    """Returns all losses over each other: the first run wide and pale, the others' dashes take turns along it."""
    curves = [
        Curve(name=named(variant), points=plots.series(_entries(variant["steps"], variant["losses"]), "loss"), **line)
        for variant, line in zip(proof["variants"], _lines(proof["variants"]), strict=True)
    ]
    marks = [*_differs_at(proof), *(Mark(at=step, text="✗", color="bad") for step, _ in kills)]
    return plots.plot("Loss of every run by step", "loss", curves, end=_end(proof), marks=marks)


def drift_plot(proof: ProofResult) -> Plot | None:
    """Returns the difference of each run's losses from the first run's; None where no loss differs."""
    variants, lines = proof["variants"], _lines(proof["variants"])
    first = variants[0]["losses"]
    gaps = [[b - a for a, b in zip(first, variant["losses"], strict=False)] for variant in variants]
    if not any(gap and math.isfinite(gap) for values in gaps for gap in values):
        return None
    curves = [
        Curve(
            name=named(variant),
            points=plots.series(_entries(variant["steps"], values), "loss"),
            color=line["color"],
            width=1.4,
        )
        for values, variant, line in zip(gaps, variants, lines, strict=True)
    ]
    label = "Difference of every run's loss from the first"
    return plots.plot(label, "difference", curves, end=_end(proof), marks=_differs_at(proof), height=240)


def chunk_ends(proof: ProofResult) -> list[tuple[str, str, list[float]]]:
    """Returns name, colour and the ends of chunks in percent of all steps, for each run."""
    return [
        (named(variant), line["color"], [100 * target / _end(proof) for target in variant["targets"]])
        for variant, line in zip(proof["variants"], _lines(proof["variants"]), strict=True)
    ]


def _lines(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Returns a style per run; a dash of no length moves the dashes of each along the line."""
    colors = cycle(("orange", "green", "purple", "amber"))
    stripes, dash = min(len(variants) - 1, MAX_STRIPES), 8.0
    gap = dash * max(stripes - 1, 0.8)
    styles: list[dict[str, Any]] = [{"color": "blue", "width": 7.0, "alpha": 0.3}]
    for place in range(len(variants) - 1):
        before = dash * (place % MAX_STRIPES)
        dashes = (0.0, before, dash, max(gap - before, 0.0)) if before else (dash, gap)
        styles.append({"color": next(colors), "width": 1.8, "dash": dashes})
    return styles


def _end(proof: ProofResult) -> int:
    return max(variant["targets"][-1] for variant in proof["variants"])


def _differs_at(proof: ProofResult) -> list[Mark]:
    difference = proof["first_difference"]
    if difference is None or difference["what"] != "loss":
        return []
    return [Mark(at=difference["step"], text=f"first difference, value {difference['logged_value']:,}", color="bad")]


def _entries(steps: Sequence[int], values: Sequence[float]) -> list[dict[str, float]]:
    return [{"step": step, "loss": value} for step, value in zip(steps, values, strict=False)]
