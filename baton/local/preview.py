"""Preview of a recipe's sources on this machine: the first ones, their format, and their lengths."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from baton import events
from baton.errors import AbsentError, BatonError, StoreError, UserError
from baton.kfp import processes
from baton.models import gguf_file
from baton.recipe import load
from baton.recipe.model import Model
from baton.recipe.recipe import Recipe
from baton.runs.documents import Preview, Survey
from baton.source import prepare
from baton.store import sources

LOOKED_AT = 20  # rows that tell whether a recipe's method learns from them


def describe_rows(recipe: Recipe) -> Iterator[str]:
    """Yields a description of a recipe's first rows; of sources elsewhere, whether they are there."""
    for part, name, _ in prepare.parts_of(recipe):
        of = f"{name.removeprefix('-')}: " if name else ""
        elsewhere = [source.uri for source in part.data.sources if "://" in source.uri]
        yield from (f"{of}data.source {uri}: {_seen_from_here(uri)}" for uri in elsewhere)
        if not elsewhere:
            yield from _describe_rows(part, of, recipe.model)


def _seen_from_here(uri: str) -> str:
    if uri.startswith("hf://"):
        return "on the hub, not read yet; `baton data check` reads them"
    try:
        found = len(sources.files([uri]))
    except AbsentError as error:
        raise UserError(f"data.source {uri!r}: {error.message}", remedy="Check the address.") from None
    except StoreError as error:
        return f"not read: {error.message}"
    return f"{found:,} file(s), with unread rows; `baton data check` reads them"


def _describe_rows(recipe: Recipe, of: str, start: Model) -> Iterator[str]:
    heard: list[events.Event] = []
    rows = first_rows(recipe, LOOKED_AT, None, heard.append)
    for source in heard:
        if isinstance(source, events.Source):
            yield f"{of}{os.path.basename(source.uri)} holds {source.in_words}"
    if recipe.data.system is not None:
        prepare.check_rows(recipe, start, [row["row"] for row in rows if "row" in row])
    rejected = [row for row in rows if "reason" in row]
    if not rejected:
        return
    row = rejected[0]
    example = f"{os.path.basename(str(row['file']))} line {row['line']}: {row['reason']}"
    if len(rejected) == len(rows):
        raise UserError(
            f"{of}none of the first {len(rows)} rows of data.source is usable; the first is {example}.",
            remedy="Check data.format and data.columns against the rows; `baton data check` reads all of them.",
        )
    yield f"{of}{len(rejected)} of the first {len(rows)} rows are unusable, such as {example}; see `baton data check`"


def first_rows(
    recipe: Recipe, count: int, side: str | None, on_event: Callable[[events.Event], None]
) -> list[dict[str, Any]]:
    """Returns the first rows of a recipe as `baton.data.ingest` has them, unusable ones among them."""
    head = _answer("first_rows", load.dumps(recipe), [str(count), side or ""], on_event)
    return [json.loads(line) for line in head.splitlines()]


def preview(recipe: Recipe, count: int, side: str | None, on_event: Callable[[events.Event], None]) -> Preview:
    """Returns the first rows of a recipe as the model sees them; unusable ones do not count."""
    return Preview.read(_answer("preview", load.dumps(recipe), [str(count), side or ""], on_event), "the preview")


MEASURED = 200  # rows whose tokens are counted


def survey(sources: Sequence[str]) -> Survey:
    """Reads the first rows of sources, whose local paths are absolute, in a process of its own."""
    return Survey.read(_answer("survey", json.dumps(list(sources)), [], lambda event: None), "the survey")


def _answer(stage: str, request: str, arguments: list[str], on_event: Callable[[events.Event], None]) -> bytes:
    """Runs a stage on a request in a file, and returns the file that it writes."""
    with tempfile.TemporaryDirectory(prefix="baton-preview-") as folder:
        file, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        file.write_text(request, encoding="utf-8")
        processes.run(f"baton.kfp.process {stage}", [str(file), *arguments, str(answer)], on_event)
        return answer.read_bytes()


def is_at_hand(model: str) -> bool:
    """Tells whether this machine has a model's tokenizer: in its folder or package, or the cache of the hub's files."""
    if model.startswith(gguf_file.PACKAGE):
        return gguf_file.is_here(model)
    if os.path.isdir(model) or (model.endswith(gguf_file.ENDING) and os.path.isfile(model)):
        return True
    if "://" in model:
        return False
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # it is no hub id
        files = ("tokenizer.json", "tokenizer_config.json")
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in files)
    return False


def lengths(recipe: Recipe, on_event: Callable[[events.Event], None] = lambda event: None) -> list[int]:
    """Returns the tokens of the first usable rows, ascending, of a pair the longer side's; none without a tokenizer."""
    try:
        with processes.environment(HF_HUB_OFFLINE="1"):  # nothing is fetched
            seen = preview(recipe, MEASURED, None, on_event)
    except BatonError:
        return []
    longest: dict[tuple[str, int], int] = {}
    for row in seen.rows:
        if not row.rejected:
            place = (row.source.file, row.source.line)
            longest[place] = max(longest.get(place, 0), row.length)
    return sorted(longest.values())
