"""`baton prove`: a recipe run once per number of chunks, in fresh processes, compared byte for byte.

With virtual workers, chunks may take turns between numbers of processes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NotRequired, TypedDict, cast

from baton.checkpoint.store import CheckpointStore
from baton.errors import BatonError, UserError
from baton.events import Event
from baton.local import forkserver
from baton.local.processes import prepare, train_chunk
from baton.models import trained
from baton.recipe import load
from baton.recipe.recipe import Recipe
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
) -> ProofResult:
    """Runs a recipe once per count of chunks and compares losses and digests with the first.

    Args:
        recipe: The recipe, its paths absolute.
        counts: Numbers of chunks.
        name: Prefix of the runs' names.
        leave_out: Parts of the state not to restore, as a negative control.
        processes: Numbers of processes that take turns from chunk to chunk; the recipe's for all when left out.
        on_event: Called with each event of the processes.

    Raises:
        BatonError: a process failed, with its message.
    """
    created = now()
    variants, launch = [], forkserver.launcher()
    for count in counts:
        document = recipe.model_dump(mode="json")
        document["chunks"]["count"] = count
        document["tracking"]["mlflow"] = None
        chunked = load.validate(document, origin=recipe.name)
        run = prepare(chunked, f"{name}-k{count}", on_event, launch)
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
            # By where in a run it shows; what is compared at the end comes last.
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
    if proof["exact"]:
        print(f"exact: all {len(proof['variants'])} runs are the same, byte for byte")
    else:
        print(f"NOT exact: first difference {json.dumps(proof['first_difference'])}")
    print(f"report: {proof['report']}")


def last_loss(variant: RunSummary) -> str:
    """Returns every digit of the last loss that a variant logged."""
    return repr(variant["losses"][-1]) if variant["losses"] else "none logged"
