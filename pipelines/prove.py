"""The promise, tried: a recipe run once per number of chunks, in fresh processes, compared byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from components.shared import events, recipe_file
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import BatonError, UserError
from components.shared.recipe import Recipe
from components.shared.runs import Run
from components.shared.storage import Storage


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
        `exact`, `variants` and `first_difference`.

    Raises:
        BatonError: a process failed, with its message.
    """
    variants = [_variant(recipe, count, f"{name}-k{count}", leave_out, on_event) for count in counts]
    differences = [found for other in variants[1:] if (found := _difference(variants[0], other))]
    shown = [{key: value for key, value in variant.items() if key != "parts"} for variant in variants]
    return {
        "exact": not differences,
        "variants": shown,
        "first_difference": differences[0] if differences else None,
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
    run = Run(Storage(recipe.store), name)
    left_out = [word for part in leave_out for word in ("--leave-out", part)]
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(recipe_file.dumps(chunked))
        file.flush()
        _process("components.data_split", [file.name, name], on_event)
    _process("components.tokenize", [run.uri], on_event)
    for index in range(1, count + 1):
        _process("components.train_chunk", [run.uri, str(index), *left_out], on_event)
    store, last = CheckpointStore(run), run.plan().num_steps
    manifest = store.manifest(last)
    assert manifest is not None
    losses = {entry["step"]: entry["loss"] for entry in store.history(last, manifest) if "loss" in entry}
    return {
        "chunks": count,
        "run": name,
        "losses": [losses[step] for step in sorted(losses)],
        "weights_sha256": manifest.meta["state"]["weights"],
        "state_digest": manifest.meta["digest"],
        "parts": manifest.meta["state"],
    }


def _difference(first: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the earliest thing in which a variant differs from the first, None if nothing does."""
    compared = {"chunks": other["chunks"], "against": first["chunks"]}
    for number, (expected, found) in enumerate(zip(first["losses"], other["losses"], strict=False), 1):
        if expected != found:
            return {**compared, "what": "loss", "logged_value": number, "expected": expected, "found": found}
    if len(first["losses"]) != len(other["losses"]):
        return {
            **compared,
            "what": "number of losses",
            "expected": len(first["losses"]),
            "found": len(other["losses"]),
        }
    for part, expected in first["parts"].items():
        if other["parts"][part] != expected:
            return {**compared, "what": part, "expected": expected, "found": other["parts"][part]}
    return None


def _process(module: str, arguments: Sequence[str], on_event: Callable[[dict[str, Any]], None]) -> None:
    """Runs one stage in a fresh interpreter.

    Raises:
        BatonError: it failed, with the message that it gave.
    """
    import os

    environment = {**os.environ, "BATON_EVENTS": "stdout", "PYTHONUNBUFFERED": "1"}
    failure: dict[str, Any] | None = None
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            if event := events.parse(line):
                failure = event if event["event"] == "error" else failure
                on_event(event)
        if process.wait() == 0:
            return
        if failure:
            kind = UserError if failure["exit_code"] == UserError.exit_code else BatonError
            raise kind(f"{failure['stage']}: {failure['message']}")
        errors.seek(0)
        tail = errors.read()[-2000:]
    raise BatonError(f"{module} {json.dumps(list(arguments))} ended with code {process.returncode}: {tail}")


def parse_counts(text: str) -> list[int]:
    """Returns the numbers in `1,2,5`.

    Raises:
        UserError: they are not at least two positive numbers.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if len(counts) < 2 or min(counts) < 1:
        raise UserError(f"--chunks {text!r} is not a list of at least two numbers above 0, such as 1,2,5.")
    return counts


def print_table(found: dict[str, Any]) -> None:
    """Prints a proof for people."""
    for variant in found["variants"]:
        print(
            f"{variant['chunks']:>3} chunk(s)  last loss {variant['losses'][-1]!r}  "
            f"weights {variant['weights_sha256'][:16]}  state {variant['state_digest'][:16]}"
        )
    if found["exact"]:
        print(f"exact: all {len(found['variants'])} runs are the same, byte for byte")
    else:
        print(f"NOT exact: first difference {json.dumps(found['first_difference'])}")
