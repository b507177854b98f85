"""Reads sources to records, each in its own format, and keeps and counts rows that cannot be used.

Before anything runs, `first_rows` has the first rows as the split would write them, and `preview` as the model sees
them; `survey`, before there is a recipe, tells which training methods can use them.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

from baton import events
from baton.data import normalize, readers, schema
from baton.data.assign import SIDE_NAMES, SplitAssigner
from baton.data.quality import Inspection
from baton.data.rows import Record, RejectedRows, SourceRow, UnusableRow, as_content
from baton.errors import RowError, UserError
from baton.models import chat
from baton.recipe.data import Columns, DataSource
from baton.recipe.methods import SPECS
from baton.recipe.recipe import Recipe
from baton.runs.documents import Fit, Preview, PreviewRow, SourceLocation, Survey
from baton.runs.run import Run
from baton.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LOOKED_AT = 20  # rows whose columns decide the format
WAITING = 2**20  # bytes of broken rows among the first ones held in memory; more wait on disk


@dataclass(kw_only=True)
class OpenSource:
    """A source that is being read."""

    source: DataSource
    layout: schema.ColumnMapping
    rows: Iterator[SourceRow | UnusableRow]  # not yet taken
    files: Counter[str] = field(default_factory=Counter)  # type → number
    used: int = 0
    rejected: int = 0
    became: Columns = field(default_factory=dict)  # our column name → the source's
    unused: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        return {
            "uri": self.source.uri,
            "files": dict(sorted(self.files.items())),
            "format": self.layout.format,
            "columns": self.became,
            "unused": self.unused,
            "rows": self.used,
            "rejected": self.rejected,
        }


class Ingest:
    """All sources of a recipe, `supplies`; unusable rows go to `refused`.

    Raises:
        UserError: a source cannot be read, fits no format, lacks a column that the recipe names, or does not go with
            the others.
    """

    def __init__(self, recipe: Recipe, refused: RejectedRows) -> None:
        self._recipe, self._refused = recipe, refused
        self._shape: dict[str, type] | None = None
        self.supplies = [_open(source, recipe) for source in recipe.data.sources]
        schema.require_one_shape([(supply.source.uri, supply.layout) for supply in self.supplies])
        for supply in self.supplies:
            told: dict[str, Any] = {"uri": supply.source.uri, "format": supply.layout.format, "columns": supply.became}
            events.emit(events.Source(**told, unused=supply.unused))

    @property
    def used(self) -> int:
        return sum(supply.used for supply in self.supplies)

    @property
    def format(self) -> str:
        return ", ".join(dict.fromkeys(supply.layout.format for supply in self.supplies))

    def records(self) -> Iterator[Record]:
        """Yields the usable rows, source by source; keeps the others."""
        for place in range(len(self.supplies)):
            for outcome in self.outcomes(place):
                if isinstance(outcome, Record):
                    yield outcome
                else:
                    self._refused.add(outcome)

    def outcomes(self, place: int) -> Iterator[Record | UnusableRow]:
        """Yields the rows of one source, by its index in `data.source`."""
        supply = self.supplies[place]
        for row in supply.rows:
            outcome = row if isinstance(row, UnusableRow) else self._record(row, supply, place)
            if isinstance(outcome, Record):
                supply.used += 1
            else:
                supply.rejected += 1
            yield outcome

    def _record(self, row: SourceRow, supply: OpenSource, place: int) -> Record | UnusableRow:
        data = self._recipe.data
        try:
            try:
                normal = normalize.normalize_row(
                    row.values, supply.layout, reasoning=data.reasoning == "keep", chat=chat.may_use_chat(self._recipe)
                )
                # Some rows may have tools or a system message, and others none.
                shape = {name: type(value) for name, value in normal.items() if name not in schema.BESIDE}
                if self._shape is not None and shape != self._shape:
                    raise RowError(_unlike(self._shape, shape))
                side, key = self._placed(row.values, supply.source)
                record = Record(as_content(normal), row.file, row.line, place, side, key)
            except RowError as error:
                return UnusableRow(row.file, row.line, str(error), json.dumps(row.values, default=str))
        except RecursionError:  # readable JSON may be too deep to be written, as it is or as a row
            return UnusableRow(row.file, row.line, "nested too deep", "")
        self._shape = shape  # the first row that can be used decides for all sources
        return record

    def _placed(self, values: dict[str, object], source: DataSource) -> tuple[str, str]:
        """Returns a row's given side, and the key that decides it; each empty where there is none."""
        rule = _split_column(self._recipe)
        if source.side or rule is None:
            return source.side or "", ""
        setting, name = rule
        value = schema.value_at(values, name)
        if value is None:
            raise RowError(f"column {name!r} is missing (data.split.{setting})")
        text = normalize.encodable_text(value, repr(name))
        if setting != "column":
            return "", text
        if side := SIDE_NAMES.get(text.strip().lower()):
            return side, ""
        raise RowError(f"column {name!r} is {text!r}, expected train, eval or test")


def _split_column(recipe: Recipe) -> tuple[str, str] | None:
    """Returns the setting of `data.split` that names a column, and the column: a recipe has at most one."""
    settings = ("column", "stratify_by", "group_by")
    return next(((each, name) for each in settings if (name := getattr(recipe.data.split, each))), None)


def _open(source: DataSource, recipe: Recipe) -> OpenSource:
    files: Counter[str] = Counter()
    rows = readers.read(
        source.uri, recipe.data.sample_by, lambda kind: files.update([kind]), recipe.data.csv or readers.AS_IT_IS
    )
    usable, again = first_usable(rows)
    looked_at = [row.values for row in usable]
    present = list(dict.fromkeys(path for values in looked_at for path in schema.column_paths(values)))
    # Columns deeper than those looked for count where the recipe names them.
    named = sorted(_named(source, recipe) - {*present})
    present += [name for name in named if any(schema.value_at(values, name) is not None for values in looked_at)]
    layout = schema.infer_mapping(source, recipe, present)
    if (rule := _split_column(recipe)) and present and not source.side and rule[1] not in present:
        raise schema.missing_column(f"data.split.{rule[0]}", rule[1], source.uri, present)
    # The sampled rows come again: the source is read once.
    became = _became(layout, recipe, looked_at)
    unused = _unused(became, layout, recipe, looked_at)
    return OpenSource(source=source, layout=layout, rows=chain(again, rows), files=files, became=became, unused=unused)


def _became(layout: schema.ColumnMapping, recipe: Recipe, looked_at: list[dict[str, object]]) -> Columns:
    """Returns the source's columns by our names, with those that only turns have a place for."""
    listed = [name for name in layout.columns.values() if isinstance(name, str)]
    talks = any(isinstance(schema.value_at(row, name), list) for row in looked_at for name in listed)
    is_placed = talks or layout.format in schema.TALKS or chat.may_use_chat(recipe)
    earlier: Columns = {"history": layout.earlier} if layout.earlier else {}
    return layout.columns | (layout.beside if is_placed else {}) | earlier


def _unused(
    became: Columns, layout: schema.ColumnMapping, recipe: Recipe, looked_at: list[dict[str, object]]
) -> list[str]:
    rule = _split_column(recipe)
    used = [*became.values(), *layout.extra_columns, *([rule[1]] if rule else [])]
    names = {name for theirs in used for name in ([theirs] if isinstance(theirs, str) else theirs)}
    columns = dict.fromkeys(name for row in looked_at for name in row)
    return [name for name in columns if not any(each == name or each.startswith(f"{name}.") for each in names)]


def _named(source: DataSource, recipe: Recipe) -> set[str]:
    columns = recipe.data.columns if source.columns is None else source.columns
    mapped = [name for theirs in columns.values() for name in ([theirs] if isinstance(theirs, str) else theirs)]
    rule = _split_column(recipe)
    return {*mapped, *recipe.data.extra_columns, *([rule[1]] if rule else [])}


def first_usable(rows: Iterator[SourceRow | UnusableRow]) -> tuple[list[SourceRow], Iterator[SourceRow | UnusableRow]]:
    """Takes the first usable rows, and broken ones before and between them, which may be all of a source.

    Returns:
        The usable rows, and all taken rows in their order, for one pass.
    """
    usable: list[SourceRow] = []
    waiting = tempfile.SpooledTemporaryFile(WAITING, "w+", encoding="ascii")  # noqa: SIM115 - closed by `again`
    for row in rows:
        waiting.write("\n" if isinstance(row, SourceRow) else json.dumps(astuple(row)) + "\n")
        if isinstance(row, SourceRow):
            usable.append(row)
        if len(usable) == LOOKED_AT:
            break

    def again() -> Iterator[SourceRow | UnusableRow]:
        taken = iter(usable)
        with waiting:
            waiting.seek(0)
            for line in waiting:
                yield next(taken) if line == "\n" else UnusableRow(*json.loads(line))

    return usable, again()


def _unlike(shape: dict[str, type], other: dict[str, type]) -> str:
    """Returns why a row does not go with the rows before it."""
    for name in sorted(shape.keys() | other.keys()):
        if name not in other:
            return f"{name} is missing, the rows before have it"
        if name not in shape:
            return f"{name} is given, the rows before have none"
    name = next(name for name in shape if shape[name] is not other[name])
    kinds: dict[type, str] = {list: "a conversation", str: "a text"}
    return f"{name} is {kinds.get(other[name], other[name].__name__)}, in the rows before it is not"


NUM_REASONS = 3  # shown where no row can be used
SHOWN = 80  # characters of an example
NONE_USABLE = "Check data.format and data.columns against the rows."


def check_rejected(recipe: Recipe, run: Run, intake: Ingest, refused: RejectedRows) -> None:
    """Uploads the rejected rows; raises UserError where they are too many, or of unknown number."""
    refused.close()
    if refused.first is None:
        return
    path = run.path("rejected.jsonl")
    run.storage.upload(refused.path, path)
    first, total, uri = refused.first, intake.used + refused.count, run.storage.uri(path)
    example = f"the first is {_place(first)}: {first.reason}"
    place = f"They are kept with their reasons in {uri}."
    events.emit(events.Rejected(count=refused.count, of=total, first=example, uri=uri))
    if refused.count > recipe.data.max_rejected * total:
        raise UserError(
            f"{refused.count} of {total} rows are unusable, above data.max_rejected "
            f"{recipe.data.max_rejected:g}; {example if intake.used else _most_frequent(refused)}. {place}",
            remedy="Fix the data or raise data.max_rejected." if intake.used else NONE_USABLE,
        )
    if (last := refused.broken_off) and recipe.data.max_rejected < 1:
        raise UserError(
            f"data.source: {last.file} cannot be read from line {last.line} on, and how many rows that loses is "
            f"unknown: {last.reason}.",
            remedy="Write the file again, or set data.max_rejected to 1 to continue with what can be read.",
        )
    if not intake.used:
        raise UserError(f"none of {total} rows is usable; {_most_frequent(refused)}. {place}", remedy=NONE_USABLE)


def _most_frequent(refused: RejectedRows) -> str:
    """Returns the most frequent reasons, each with its number of rows and an example."""
    reasons = sorted(refused.reasons.values(), key=lambda counted: -counted[0])
    shown = [
        f"{count} × {row.reason}, such as {_place(row)}: {' '.join(row.raw.split())[:SHOWN]!r}"
        for count, row in reasons[:NUM_REASONS]
    ]
    rest = f"\n  and {len(reasons) - NUM_REASONS} more reason(s)" if len(reasons) > NUM_REASONS else ""
    return "\n  ".join(["the reasons are:", *shown]) + rest


def _place(row: UnusableRow) -> str:
    return f"{os.path.basename(row.file)} line {row.line}"


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
        is_chat=layout.format in schema.TALKS or bool(talks),
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
