"""Which columns of a source hold what: found from their names and the method, or as the recipe says."""

from __future__ import annotations

from dataclasses import dataclass

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Data, Recipe
from baton.components.shared.recipe.data import Columns, Source
from baton.components.shared.recipe.methods import MethodSpec

PROMPTS = ("prompt", "question", "query", "problem", "input")
ANSWERS = ("completion", "response", "answer", "output", "solution")

NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages",)},
    "sharegpt": {"conversations": ("conversations", "conversation")},
    "prompt-completion": {"prompt": PROMPTS, "completion": ANSWERS},
    "instruction": {"instruction": ("instruction",), "output": ("output", "response", "completion", "answer")},
    "text": {"text": ("text", "content")},
    "rated": {"prompt": PROMPTS, "completion": ANSWERS, "label": ("label",)},
    "preference": {"chosen": ("chosen",), "rejected": ("rejected",)},
    "ranked": {"prompt": (*PROMPTS, "instruction"), "responses": ("responses", "completions", "answers")},
    "prompt": {"prompt": PROMPTS},
}
"""Columns each format needs, in the order in which formats are tried: our name → the names it goes by, ours first."""

OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "instruction": {"input": ("input", "context")},
    "preference": {"prompt": (*PROMPTS, "instruction")},
    "ranked": {"scores": ("scores", "ratings")},
    "prompt": {"answer": ("answer", "solution", "ground_truth")},
}
"""Columns a format takes where they are there."""

WRITTEN: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("prompt", "completion"),
    "text": ("text",),
    "rated": ("prompt", "completion", "label"),
    "preference": ("prompt", "chosen", "rejected"),
    "ranked": ("prompt", "chosen", "rejected"),
    "prompt": ("prompt", "answer"),
}
"""Columns that rows of each format come out with."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Maps a source's columns and format to Baton's rows.

    Attributes:
        format: Shape of a row.
        columns: Our column name → the source's, or several that are joined; a column that the format takes and that
            is not here goes by our name.
        join: Put between columns that are joined.
        extra_columns: Further columns to keep.
    """

    format: str
    columns: Columns
    join: str = "\n\n"
    extra_columns: tuple[str, ...] = ()

    def name(self, ours: str) -> str:
        """Returns what the source calls a column, for messages."""
        theirs = self.columns.get(ours, ours)
        return repr(theirs) if isinstance(theirs, str) else " + ".join(map(repr, theirs))


def of(source: Source, recipe: Recipe, present: list[str]) -> Layout:
    """Returns the layout of a source whose first rows have these columns.

    A format that is not named is the first that the method learns from and whose columns are there by their own names
    or by `columns`, and then by the names that are common for them (`question` and `answer`, `query` and `response`,
    `instruction` and `response`, …). `input` is a prompt only where there is no `instruction`.

    Raises:
        UserError: the columns fit no format that the method learns from, or one that is named is not there.
    """
    data, spec = recipe.data, recipe.training.spec
    mapped = data.columns if source.columns is None else source.columns
    named = source.format or data.format
    if named != "auto" and named not in spec.formats:
        raise UserError(
            f"data.source {source.uri!r} has format {named}, and {spec.name} learns from {' or '.join(spec.formats)}."
        )
    tried = [name for name in NEEDED if name in spec.formats] if named == "auto" else [named]
    for common in (False, True):
        for name in tried:
            columns = _columns(NEEDED[name], mapped, present, common)
            if columns is not None:
                optional = _optional(OPTIONAL.get(name, {}), mapped, present, columns)
                layout = Layout(
                    format=name, columns=columns | optional, join=data.join, extra_columns=tuple(data.extra_columns)
                )
                _check_extras(layout, source, present)
                return layout
    raise _unfit(source, named, spec, mapped, present)


def _columns(needed: dict[str, tuple[str, ...]], mapped: Columns, present: list[str], common: bool) -> Columns | None:
    columns: Columns = {}
    for ours, names in needed.items():
        theirs = _column(ours, names, mapped, present, common=common, taken=columns)
        if theirs is None:
            return None
        columns[ours] = theirs
    return columns


def _optional(taken: dict[str, tuple[str, ...]], mapped: Columns, present: list[str], assigned: Columns) -> Columns:
    """Returns the columns that are there, and those that the recipe maps: they may come later."""
    columns: Columns = {}
    for ours, names in taken.items():
        theirs = mapped.get(ours) or _column(ours, names, {}, present, common=True, taken=assigned)
        if theirs is not None:
            columns[ours] = theirs
    return columns


def _column(
    ours: str, names: tuple[str, ...], mapped: Columns, present: list[str], *, common: bool, taken: Columns
) -> str | list[str] | None:
    """Returns the column or columns that hold what we call `ours`, None where they are not there."""
    if ours in mapped:
        theirs = mapped[ours]
        wanted = [theirs] if isinstance(theirs, str) else theirs
        return theirs if any(name in present for name in wanted) else None
    for name in names if common else names[:1]:
        other_use = name in taken.values() or (ours == "prompt" and name == "input" and "instruction" in present)
        if name in present and not other_use:
            return name
    return None


def _check_extras(layout: Layout, source: Source, present: list[str]) -> None:
    for name in layout.extra_columns:
        if name not in present:
            raise missing("data.extra_columns", name, source.uri, present)
        if name in WRITTEN[layout.format] and layout.columns.get(name, name) != name:
            raise UserError(
                f"data.extra_columns: {name!r} is a column of {source.uri}, and the name of what comes out of "
                f"{layout.name(name)}; both cannot be kept.",
                remedy="Give the source's column another name.",
            )


def missing(setting: str, column: str, uri: str, present: list[str]) -> UserError:
    """Returns the error of a column that is named and not there."""
    return UserError(
        f"{setting}: {column!r} is no column of {uri}; its first rows have {', '.join(sorted(present))}.",
        remedy=f"Change {setting}.",
    )


def _unfit(source: Source, named: str, spec: MethodSpec, mapped: Columns, present: list[str]) -> UserError:
    for ours, theirs in mapped.items():
        wanted = [theirs] if isinstance(theirs, str) else theirs
        if ours in {name for shape in NEEDED.values() for name in shape} and not set(wanted) & set(present):
            return missing(f"data.columns.{ours}", ", ".join(wanted), source.uri, present)
    allowed = spec.formats if named == "auto" else (named,)
    shapes = "; ".join(f"{name}: {', '.join(NEEDED[name])}" for name in allowed)
    fits = f"no format that {spec.name} learns from" if named == "auto" else "not the format it is said to have"
    return UserError(
        f"data.source {source.uri!r} has columns {', '.join(sorted(present))}, which fit {fits} ({shapes}).",
        remedy="Map them with data.columns, for example {prompt: question, completion: answer}.",
    )


def require_one_shape(layouts: list[tuple[str, Layout]]) -> None:
    """Checks that rows of several sources can be trained on together.

    Args:
        layouts: Address and layout of each source.

    Raises:
        UserError: they come out with different columns.
    """
    first_uri, first = layouts[0]
    for uri, layout in layouts[1:]:
        if WRITTEN[layout.format] != WRITTEN[first.format]:
            raise UserError(
                f"data.source: {first_uri} is {first.format} and {uri} is {layout.format}, which are not trained on "
                "together.",
                remedy="Bring them to one format, with data.columns or a source's own format and columns.",
            )


def plain_text(data: Data) -> Layout:
    """Returns the layout of plain text, for a source in which no row has a column."""
    return Layout(format="text", columns={"text": "text"}, join=data.join)
