"""The first rows of a recipe's sources, looked at on this machine before anything runs."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baton.components.shared.core import events
from baton.components.shared.core.errors import AbsentError, StoreError, UserError
from baton.components.shared.recipe import Model, Recipe, recipe_file
from baton.components.shared.store import sources
from baton.pipelines.compiling import prepare, rendering
from baton.pipelines.local import processes

HEAD = "baton.components.data_split.head"
LOOKED_AT = 20
"""Rows that tell whether a recipe's method learns from them."""


def report(recipe: Recipe) -> Iterator[str]:
    """Yields what the first rows of a recipe are, in words; of sources that are elsewhere, whether they are there.

    Args:
        recipe: The recipe, its paths absolute.

    Raises:
        UserError: its method does not learn from such rows, none of the first ones can be used, or a source is not
            there.
    """
    for part, name, _ in prepare.parts_of(recipe):
        of = f"{name.removeprefix('-')}: " if name else ""
        elsewhere = [source.uri for source in part.data.sources if "://" in source.uri]
        yield from (f"{of}data.source {uri}: {_seen_from_here(uri)}" for uri in elsewhere)
        if not elsewhere:
            yield from _report(part, of, recipe.model)


def _seen_from_here(uri: str) -> str:
    """Returns what can be seen of a source that is not on this machine.

    Raises:
        UserError: it is not there.
    """
    if uri.startswith("hf://"):
        return "on the hub, nothing was looked at; `baton data check` does"
    try:
        found = len(sources.files([uri]))
    except AbsentError as error:
        raise UserError(f"data.source {uri!r}: {error.message}", remedy="Check the address.") from None
    except StoreError as error:
        return f"nothing was looked at: {error.message}"
    return f"{found:,} file(s), whose rows were not looked at; `baton data check` does"


def _report(recipe: Recipe, of: str, start: Model) -> Iterator[str]:
    found: list[events.Source] = []

    def heard(event: events.Event) -> None:
        if isinstance(event, events.Source):
            found.append(event)

    rows = first(recipe, LOOKED_AT, None, heard)
    for source in found:
        yield f"{of}{os.path.basename(source.uri)} holds {source.in_words}"
    if recipe.data.system is not None:
        rendering.check_rows(recipe, start, [row["row"] for row in rows if "row" in row])
    rejected = [row for row in rows if "reason" in row]
    if not rejected:
        return
    row = rejected[0]
    example = f"{os.path.basename(str(row['file']))} line {row['line']}: {row['reason']}"
    if len(rejected) == len(rows):
        raise UserError(
            f"{of}none of the first {len(rows)} rows of data.source is usable; the first is {example}.",
            remedy="Check data.format and data.columns against the rows; `baton data check` looks at all of them.",
        )
    yield f"{of}{len(rejected)} of the first {len(rows)} rows are unusable, such as {example}; see `baton data check`"


def first(
    recipe: Recipe, count: int, side: str | None, on_event: Callable[[events.Event], None]
) -> list[dict[str, Any]]:
    """Returns the first rows of a recipe as `data_split.head` writes them, unusable ones among them.

    Raises:
        BatonError: they cannot be read, or fit no format that the method learns from.
    """
    with tempfile.TemporaryDirectory(prefix="baton-head-") as folder:
        file, head = Path(folder, "recipe.json"), Path(folder, "head.jsonl")
        file.write_text(recipe_file.dumps(recipe), encoding="utf-8")
        processes.run(HEAD, [str(file), str(count), side or "", str(head)], on_event)
        return [json.loads(line) for line in head.read_text(encoding="ascii").splitlines()]
