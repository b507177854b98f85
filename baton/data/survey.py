"""Rows looked at before there is a recipe: which methods learn from them, and what they are to each:
`python -m baton.data.survey SOURCES_JSON_FILE TARGET`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from baton import events
from baton.data import normalize, readers, schema
from baton.data.rows import Rejected, Row, RowError
from baton.data.schema import TALKS, ColumnMapping
from baton.errors import UserError
from baton.recipe.data import Source
from baton.recipe.methods import SPECS
from baton.recipe.recipe import Recipe
from baton.runs.documents import Fit, Survey

LOOKED_AT = 1000
"""Rows that are looked at."""
COUNTED = 200_000
"""Rows up to which those of files on this machine are counted."""
NUMBER = re.compile(r"\d\W*$")


def survey(sources: list[str]) -> Survey:
    """Looks at the first rows of sources.

    Args:
        sources: As `data.source`, local paths absolute.

    Raises:
        UserError: one cannot be read, or there are no rows.
    """
    files: Counter[str] = Counter()
    rows: list[Row | Rejected] = []
    count: int | None = 0
    for source in sources:
        reader = readers.read(source, "line", lambda kind: files.update([kind]))
        rows += islice(reader, max(LOOKED_AT // len(sources), 1))
        if count is not None:
            rest = islice(reader, COUNTED) if "://" not in source else iter([None])
            count += sum(1 for _ in rest)
            count = None if "://" in source or count >= COUNTED else count
    if not rows:
        raise UserError(f"data.source {', '.join(sources)} holds no rows.", remedy="Check the path.")
    found = [row for row in rows if isinstance(row, Row)]
    present = list(dict.fromkeys(path for row in found for path in schema.column_paths(row.values)))
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, spec in SPECS.items():
        groups.setdefault(spec.formats, []).append(name)
    return Survey(
        columns=schema.outermost_columns(present),
        looked_at=len(rows),
        rows=None if count is None else count + len(rows),
        files=dict(sorted(files.items())),
        fits=[_fit(sources[0], methods, found, present) for methods in groups.values()],
    )


def _fit(source: str, methods: list[str], rows: list[Row], present: list[str]) -> Fit:
    """Returns what rows are to methods that learn from the same formats."""
    recipe = _recipe(source, methods[0])
    try:
        layout = (
            schema.infer_mapping(Source(uri=source), recipe, present)
            if present
            else schema.plain_text_mapping(recipe.data)
        )
    except UserError as error:
        return Fit(methods=methods, reason=error.message)
    if layout.format not in recipe.training.spec.formats:
        return Fit(methods=methods, reason="the rows are plain text")
    normal: list[dict[str, Any]] = []
    reason = ""
    for row in rows:
        try:
            normal.append(normalize.normalize_row(row.values, layout))
        except RowError as error:
            reason = reason or str(error)
    answers = [str(row["answer"]) for row in normal if row.get("answer")]
    characters = sorted(_characters(row) for row in normal)
    talks = [talk for row in normal for talk in row.values() if isinstance(talk, list)]
    return Fit(
        methods=methods,
        format=layout.format,
        columns={ours: theirs for ours, theirs in layout.columns.items() if _is_named(ours, theirs, layout)},
        usable=len(normal),
        reason=reason,
        is_chat=layout.format in TALKS or bool(talks),
        turns=max((len(talk) for talk in talks), default=0),
        answers=len(answers),
        numbers=sum(bool(NUMBER.search(answer.strip())) for answer in answers),
        good=sum(row.get("label") is True for row in normal),
        characters=[characters[int(share * (len(characters) - 1))] for share in (0.5, 0.99, 1)] if characters else [],
    )


def _is_named(ours: str, theirs: str | list[str], layout: ColumnMapping) -> bool:
    return theirs != ours and (ours in layout.needed or isinstance(theirs, str))


def _characters(row: dict[str, object]) -> int:
    """Returns the characters of a row's longest way through the model: of a pair the longer side."""
    sizes = {name: len(json.dumps(value, ensure_ascii=False)) for name, value in row.items() if name != "label"}
    sides = [sizes.pop(name) for name in ("chosen", "rejected") if name in sizes]
    sizes.pop("answer", None)
    return sum(sizes.values()) + max(sides, default=0)


def _recipe(source: str, method: str) -> Recipe:
    """Returns a recipe of a method, for what in it is no matter of the rows."""
    least = SPECS[method].example
    return Recipe.model_validate(
        {
            "name": "survey",
            "model": {"base": "org/model"},
            "data": {"source": source},
            "training": {"method": method, **({method: dict(least)} if least else {})},
        }
    )


def main(sources_path: str, target: str) -> None:
    """Writes what was found as a JSON document."""
    sources: Iterable[str] = json.loads(Path(sources_path).read_text(encoding="utf-8"))
    Path(target).write_text(json.dumps(survey(list(sources)).model_dump(mode="json")), encoding="ascii")


if __name__ == "__main__":
    with events.stage("data split"):
        main(sys.argv[1], sys.argv[2])
