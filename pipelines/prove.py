"""The promise, tried: a recipe run once per number of chunks, in fresh processes, compared byte for byte."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.shared import recipe_file
from components.shared.checkpoints.store import CheckpointStore
from components.shared.errors import BatonError, UserError
from components.shared.recipe import Recipe
from components.shared.runs import Run, now
from pipelines import processes, warm

_WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")
_UNSHOWN = ("parts", "fingerprint")


def prove(
    recipe: Recipe,
    counts: Sequence[int],
    *,
    name: str,
    leave_out: Sequence[str] = (),
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> dict[str, Any]:
    """Runs a recipe once per count of chunks and compares losses and digests with the first.

    Args:
        recipe: The recipe, its paths absolute.
        counts: Numbers of chunks.
        name: Prefix of the runs' names.
        leave_out: Parts of the state not to restore, as a negative control.
        on_event: Called with each event of the processes.

    Returns:
        `recipe` (its name), `created`, `leave_out`, `exact`, `variants`, `first_difference` (the earliest of all
        variants'), and the `fingerprint` of the machine. Each variant has its own `difference` from the first
        variant. A difference is None where there is none.

    Raises:
        BatonError: a process failed, with its message.
    """
    created = now()
    variants = [_variant(recipe, count, f"{name}-k{count}", leave_out, on_event) for count in counts]
    differences = [difference(variants[0], variant) for variant in variants]
    found = [difference for difference in differences if difference]
    shown = [{key: value for key, value in variant.items() if key not in _UNSHOWN} for variant in variants]
    return {
        "recipe": recipe.name,
        "created": created,
        "leave_out": [str(part) for part in leave_out],
        "exact": not found,
        "variants": [{**row, "difference": each} for row, each in zip(shown, differences, strict=True)],
        "first_difference": min(found, key=_place, default=None),
        "fingerprint": variants[0]["fingerprint"],
    }


def _variant(
    recipe: Recipe,
    count: int,
    name: str,
    leave_out: Sequence[str],
    on_event: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    document = recipe.model_dump(mode="json")
    document["chunks"]["count"] = count
    document["tracking"]["mlflow"] = None
    chunked = recipe_file.validate(document, origin=recipe.name)
    left_out = [word for part in leave_out for word in ("--leave-out", part)]
    launch = warm.launcher()
    run = processes.prepare(chunked, name, on_event, launch)
    for index in range(1, count + 1):
        processes.run(processes.TRAIN_CHUNK, [run.uri, str(index), *left_out], on_event, launch)
    return outcome(run, count)


def outcome(run: Run, count: int) -> dict[str, Any]:
    """Returns what a finished run logged, and the state and files of its last checkpoint."""
    store, plan = CheckpointStore(run), run.plan()
    checkpoint = store.read(plan.num_steps)
    assert checkpoint is not None
    losses = {entry["step"]: entry["loss"] for entry in store.history(checkpoint) if "loss" in entry}
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
        "fingerprint": checkpoint.meta.fingerprint.to_json(),
    }


def weights_sha256(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the SHA-256 of a checkpoint's weights file.

    Args:
        files: The files of its manifest.

    Returns:
        The file's own; of weights in several files, the SHA-256 of what `sha256sum` prints for them in order.

    Raises:
        BatonError: none of the files holds weights.
    """
    names = sorted(name for name in files if _WEIGHTS.fullmatch(name))
    if not names:
        raise BatonError(f"the last checkpoint holds no weights file, only {', '.join(sorted(files)) or 'nothing'}.")
    digests = [str(files[name]["sha256"]) for name in names]
    lines = "".join(f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True))
    return digests[0] if len(names) == 1 else hashlib.sha256(lines.encode()).hexdigest()


def difference(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the earliest thing in which a variant differs from the first, None if nothing does."""
    compared = {"chunks": other["chunks"], "against": first["chunks"]}
    for number, (expected, found) in enumerate(zip(first["losses"], other["losses"], strict=False), 1):
        if repr(expected) != repr(found):  # a loss that is not a number equals itself by its digits only
            where = {"logged_value": number, "step": other["steps"][number - 1]}
            return {**compared, "what": "loss", **where, "expected": expected, "found": found}
    if len(first["losses"]) != len(other["losses"]):
        numbers = {"expected": len(first["losses"]), "found": len(other["losses"])}
        return {**compared, "what": "number of losses", **numbers}
    for part, expected in first["parts"].items():
        if other["parts"][part] != expected:
            return {**compared, "what": part, "expected": expected, "found": other["parts"][part]}
    expected, found = first["weights_sha256"], other["weights_sha256"]
    return {**compared, "what": "weights file", "expected": expected, "found": found} if expected != found else None


def _place(difference: dict[str, Any]) -> float:
    """Returns where in a run a difference shows; what is compared at the end comes last."""
    return float(difference.get("logged_value", math.inf))


def parse_counts(text: str) -> list[int]:
    """Returns the numbers in `1,2,5`.

    Raises:
        UserError: they are not at least two positive numbers, each once.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if len(counts) < 2 or len(set(counts)) < len(counts) or min(counts) < 1:
        raise UserError(f"--chunks {text!r} is not a list of at least two different numbers above 0, such as 1,2,5.")
    return counts


def print_table(found: dict[str, Any]) -> None:
    """Prints a proof for people."""
    for variant in found["variants"]:
        print(
            f"{variant['chunks']:>3} chunk(s)  last loss {last_loss(variant)}  "
            f"weights {variant['weights_sha256'][:16]}  state {variant['state_digest'][:16]}"
        )
    if found["exact"]:
        print(f"exact: all {len(found['variants'])} runs are the same, byte for byte")
    else:
        print(f"NOT exact: first difference {json.dumps(found['first_difference'])}")
    print(f"report: {found['report']}")


def last_loss(variant: dict[str, Any]) -> str:
    """Returns every digit of the last loss that a variant logged."""
    return repr(variant["losses"][-1]) if variant["losses"] else "none logged"
