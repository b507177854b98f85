"""What a starter recipe is made from: the rows as they are found, and their lengths in tokens."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.components.shared.core.errors import BatonError
from baton.components.shared.core.events import Event
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.rows import Seen
from baton.components.shared.runs.documents.survey import Survey
from baton.pipelines.local import processes, rows

SURVEY = "baton.components.data_split.survey"
PREVIEW = "baton.components.tokenize.preview"
MEASURED = 200
"""Rows whose tokens are counted."""


def survey(sources: Sequence[str]) -> Survey:
    """Looks at the first rows of sources, in a process of its own.

    Args:
        sources: As `data.source`, local paths absolute.

    Raises:
        BatonError: they cannot be read, or hold no rows.
    """
    with tempfile.TemporaryDirectory(prefix="baton-survey-") as folder:
        asked, found = Path(folder, "sources.json"), Path(folder, "survey.json")
        asked.write_text(json.dumps(list(sources)), encoding="utf-8")
        processes.run(SURVEY, [str(asked), str(found)], lambda event: None)
        return Survey.read(found.read_bytes(), str(found))


def is_at_hand(model: str) -> bool:
    """Tells whether a model's tokenizer lies on this machine: in its folder, or in the cache of the hub's files."""
    if os.path.isdir(model):
        return True
    if "://" in model:
        return False
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # it is no hub id
        files = ("tokenizer.json", "tokenizer_config.json")
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in files)
    return False


def lengths(recipe: Recipe, on_event: Callable[[Event], None] = lambda event: None) -> list[int]:
    """Returns the tokens of the first usable rows as the model sees them, ascending; of a pair, of the longer side.

    Nothing is fetched. Returns none where they cannot be counted.

    Args:
        recipe: A recipe for the rows, its paths absolute.
        on_event: Told what the processes tell.
    """
    with tempfile.TemporaryDirectory(prefix="baton-lengths-") as folder, _offline():
        file, head, seen = (Path(folder, name) for name in ("recipe.json", "head.jsonl", "seen.json"))
        file.write_text(recipe_file.dumps(recipe), encoding="utf-8")
        try:
            processes.run(rows.HEAD, [str(file), str(MEASURED), "", str(head)], on_event)
            processes.run(PREVIEW, [str(file), str(head), str(MEASURED), str(seen)], on_event)
        except BatonError:
            return []
        longest: dict[tuple[str, int], int] = {}
        for row in Seen.read(seen.read_bytes(), str(seen)).rows:
            if not row.rejected:
                place = (row.source.file, row.source.line)
                longest[place] = max(longest.get(place, 0), row.length)
        return sorted(longest.values())


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keeps processes that are started within off the hub."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
