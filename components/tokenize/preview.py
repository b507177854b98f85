"""First rows as the model sees them, for people:
`python -m baton.components.tokenize.preview RECIPE_JSON_FILE HEAD_FILE COUNT TARGET`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.components.shared.core import events
from baton.components.shared.models import conversing, loading, today
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.rows import Place, Seen, SeenRow
from baton.components.tokenize import bpe, seen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preview(recipe: Recipe, head: list[dict[str, Any]], count: int) -> Seen:
    """Returns the first rows of a recipe as the model sees them.

    Args:
        recipe: The recipe, its paths absolute.
        head: What `data_split.head` wrote.
        count: Rows that are shown; a tokenizer that the run trains is trained on all of them here.

    Raises:
        UserError: there is no tokenizer, or no chat template that does.
    """
    note = ""
    if recipe.model.tokenizer and recipe.model.tokenizer.train:
        learned = len(_learned(head))
        note = f"The tokenizer was trained on {learned:,} rows here; the run trains it on all, so that tokens differ."
    return Seen(
        method=recipe.training.method,
        max_length=recipe.data.max_length,
        joined=recipe.data.packing is True,
        note=note,
        rows=list(_rows(recipe, head, count)),
    )


def _rows(recipe: Recipe, head: list[dict[str, Any]], count: int) -> Iterator[SeenRow]:
    first = next((entry["row"] for entry in head if "row" in entry), None)
    tokenizer = None
    if first is not None:
        tokenizer = _tokenizer(recipe, head)
        today.tell(recipe.data.today)
        conversing.require_template(recipe, tokenizer)
        conversing.changes(first, recipe, chat=conversing.applies(recipe, tokenizer))
    used = 0
    for entry in head:
        place = Place(file=entry["file"], line=entry["line"])
        if "reason" in entry:
            yield SeenRow(source=place, text=entry["raw"], rejected=entry["reason"])
        elif tokenizer:
            yield from seen.see([(place, entry["side"], entry["row"])], recipe, tokenizer)
            used += 1
        if used == count:
            return


def _tokenizer(recipe: Recipe, head: list[dict[str, Any]]) -> PreTrainedTokenizerBase:
    base, revision = recipe.model.base, recipe.model.revision
    folder = loading.local_model(base, revision, weights=False) if base else None
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in _learned(head))
        file.flush()
        return bpe.of_run(recipe, folder, file.name)


def _learned(head: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows that a tokenizer is trained on."""
    rows = [entry for entry in head if "row" in entry]
    return [entry["row"] for entry in rows if entry["side"] in (None, "train")] or [entry["row"] for entry in rows]


def main(recipe_path: str, head_path: str, count: int, target: str) -> None:
    """Writes the first rows as the model sees them as a JSON document."""
    recipe = recipe_file.loads(Path(recipe_path).read_text(encoding="utf-8"))
    with open(head_path, encoding="ascii") as file:
        head = [json.loads(line) for line in file]
    Path(target).write_text(json.dumps(preview(recipe, head, count).model_dump(mode="json")), encoding="ascii")


if __name__ == "__main__":
    with events.stage("tokenize"):
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
