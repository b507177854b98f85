"""First rows of sources, shown before anything runs.

`first_rows` has them as the split would write them, `preview` as the model sees them; `survey`, before there is a
recipe, tells which training methods can use them.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

from baton.data import normalize, readers, schema
from baton.data.assign import SplitAssigner
from baton.data.ingest import Ingest
from baton.data.quality.inspect import Inspection
from baton.data.rows import Record, RejectedRows, SourceRow, UnusableRow
from baton.data.schema import TALKS
from baton.errors import RowError, UserError
from baton.models import chat
from baton.recipe.data import DataSource
from baton.recipe.methods import SPECS
from baton.recipe.recipe import Recipe
from baton.runs.documents import Fit, Preview, PreviewRow, SourceLocation, Survey
from baton.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_READ = 20_000  # rows read, at most, for the rows asked for
RAW = 2000  # characters shown of an unusable row
LEARNED = 1000  # rows for training a tokenizer
SURVEYED = 1000
COUNTED = 200_000  # rows of local files up to which a survey counts
NUMBER = re.compile(r"\d\W*$")


def first_rows(recipe: Recipe, count: int, side: str | None, scratch: str) -> Iterator[dict[str, Any]]:
    """Yields the first `count` rows, of several sources in turn, each with its `file`, `line` and `side`.

    Usable ones have their `row`; up to `count` unusable ones between them have the `reason` and the `raw` text. Nothing
    that needs all rows is done: `data.split` in numbers or strata, for which the side is None, and the checks for
    duplicates and leakage.

    Raises:
        UserError: sources cannot be read, or a side is asked for that only all rows decide.
    """
    intake = Ingest(recipe, RejectedRows(f"{scratch}/rejected.jsonl"))
    inspection = Inspection(recipe, scratch)
    sides = SplitAssigner(recipe, Storage(f"{scratch}/store"))
    if side and sides.needs_all:
        raise UserError(
            "data.split holds out a number of rows or strata, so that a row's side is known once all rows are read.",
            remedy="Leave out --side.",
        )
    in_turn = chain.from_iterable(zip_longest(*(intake.outcomes(place) for place in range(len(intake.supplies)))))
    used = rejected = 0
    for outcome in islice(filter(None, in_turn), MOST_READ):
        after: Record | UnusableRow = outcome
        if isinstance(outcome, Record):
            looked = inspection.look(outcome)
            after = looked or UnusableRow(outcome.file, outcome.line, inspection.findings.last, outcome.content)
        place: dict[str, object] = {"file": after.file, "line": after.line}
        if isinstance(after, UnusableRow):
            rejected += 1
            if rejected <= count:
                yield {**place, "side": None, "reason": after.reason, "raw": after.raw[:RAW]}
            continue
        where = None if sides.needs_all else sides.side(after)
        if side in (None, where):
            yield {**place, "side": where, "row": after.row}
            used += 1
        if used == count:
            return


def preview(recipe: Recipe, count: int, side: str | None, scratch: str) -> Preview:
    """Returns the first rows of a recipe as the model sees them; a run's own tokenizer is trained on `LEARNED` rows.

    Raises:
        UserError: as `first_rows`; or there is no tokenizer, or no usable chat template.
    """
    learns = recipe.model.tokenizer and recipe.model.tokenizer.train
    head = list(first_rows(recipe, max(count, LEARNED) if learns else count, side, scratch))
    note = ""
    if learns:
        learned = len(_learned(head))
        note = f"The tokenizer was trained on {learned:,} rows here; the run trains it on all, so that tokens differ."
    return Preview(
        method=recipe.training.method,
        max_length=recipe.data.max_length,
        joined=recipe.data.packing is True,
        note=note,
        rows=list(_previews(recipe, head, count)),
    )


def _previews(recipe: Recipe, head: list[dict[str, Any]], count: int) -> Iterator[PreviewRow]:
    from baton.data.preview import preview_rows

    first = next((entry["row"] for entry in head if "row" in entry), None)
    tokenizer = None
    if first is not None:
        tokenizer = _tokenizer(recipe, head)
        chat.set_template_date(recipe.data.today)
        chat.require_template(recipe, tokenizer)
        chat.rendering_changes(first, recipe, chat=chat.uses_chat(recipe, tokenizer))
    used = 0
    for entry in head:
        place = SourceLocation(file=entry["file"], line=entry["line"])
        if "reason" in entry:
            yield PreviewRow(source=place, text=entry["raw"], rejected=entry["reason"])
        elif tokenizer:
            yield from preview_rows([(place, entry["side"], entry["row"])], recipe, tokenizer)
            used += 1
        if used == count:
            return


def _tokenizer(recipe: Recipe, head: list[dict[str, Any]]) -> PreTrainedTokenizerBase:
    from baton.data import encoding
    from baton.models import loading

    base, revision = recipe.model.base, recipe.model.revision
    folder = loading.local_model(base, revision, weights=False) if base else None
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in _learned(head))
        file.flush()
        return encoding.run_tokenizer(recipe, folder, file.name)


def _learned(head: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [entry for entry in head if "row" in entry]
    return [entry["row"] for entry in rows if entry["side"] in (None, "train")] or [entry["row"] for entry in rows]


def survey(sources: list[str]) -> Survey:
    """Tells how the first rows of sources, given as `data.source` with absolute paths, fit each method.

    Raises:
        UserError: one cannot be read, or there are no rows.
    """
    files: Counter[str] = Counter()
    rows: list[SourceRow | UnusableRow] = []
    count: int | None = 0
    for source in sources:
        reader = readers.read(source, "line", lambda kind: files.update([kind]))
        rows += islice(reader, max(SURVEYED // len(sources), 1))
        if count is not None:
            rest = islice(reader, COUNTED) if "://" not in source else iter([None])
            count += sum(1 for _ in rest)
            count = None if "://" in source or count >= COUNTED else count
    if not rows:
        raise UserError(f"data.source {', '.join(sources)} holds no rows.", remedy="Check the path.")
    found = [row for row in rows if isinstance(row, SourceRow)]
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


def _fit(source: str, methods: list[str], rows: list[SourceRow], present: list[str]) -> Fit:
    """Returns how rows fit methods that learn from the same formats."""
    least = SPECS[methods[0]].example
    recipe = Recipe.model_validate(
        {
            "name": "survey",
            "model": {"base": "org/model"},
            "data": {"source": source},
            "training": {"method": methods[0], **({methods[0]: dict(least)} if least else {})},
        }
    )
    try:
        layout = schema.infer_mapping(DataSource(uri=source), recipe, present)
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
        columns={
            ours: theirs
            for ours, theirs in layout.columns.items()
            if theirs != ours and (ours in layout.needed or isinstance(theirs, str))
        },
        usable=len(normal),
        reason=reason,
        is_chat=layout.format in TALKS or bool(talks),
        turns=max((len(talk) for talk in talks), default=0),
        answers=len(answers),
        numbers=sum(bool(NUMBER.search(answer.strip())) for answer in answers),
        good=sum(row.get("label") is True for row in normal),
        characters=[characters[int(share * (len(characters) - 1))] for share in (0.5, 0.99, 1)] if characters else [],
    )


def _characters(row: dict[str, object]) -> int:
    """Returns the characters of a row's longest way through the model: of a pair the longer side."""
    sizes = {name: len(json.dumps(value, ensure_ascii=False)) for name, value in row.items() if name != "label"}
    sides = [sizes.pop(name) for name in ("chosen", "rejected") if name in sizes]
    sizes.pop("answer", None)
    return sum(sizes.values()) + max(sides, default=0)
