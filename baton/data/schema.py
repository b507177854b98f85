"""Columns of a source: by path, by names of public data sets, and mapped to rows of the method's format.

A dot in a path steps into a mapping, or to a place in a list (`answers.text.0`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Any

from baton.errors import UserError
from baton.recipe.data import Columns, DataSource
from baton.recipe.methods import SPECS, MethodSpec
from baton.recipe.recipe import Recipe

DEEPEST, WIDEST = 3, 32  # steps of a path, and parts of a value within a column, that are looked for


def value_at(values: Any, name: str) -> Any:
    """Returns a row's value by a name, which may have dots, or by a path; None where there is none."""
    if isinstance(values, dict):
        if name in values:
            return values[name]
        head, dot, rest = name.partition(".")
        while dot:
            if head in values:
                return value_at(values[head], rest)
            more, dot, rest = rest.partition(".")
            head = f"{head}.{more}"
        return None
    if isinstance(values, list):
        head, dot, rest = name.partition(".")
        if head.isascii() and head.isdigit() and len(head) < 10:
            part = values[int(head)] if int(head) < len(values) else None
            return value_at(part, rest) if dot else part
    return None


def column_paths(values: Any, depth: int = DEEPEST) -> Iterator[str]:
    parts = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in parts if depth == DEEPEST else islice(parts, WIDEST):
        yield str(key)
        if depth > 1:
            yield from (f"{key}.{path}" for path in column_paths(value, depth - 1))


def outermost_columns(present: list[str]) -> list[str]:
    """Returns the names that are not within another, sorted."""
    names = set(present)
    return sorted(name for name in names if not any(name[:at] in names for at, mark in enumerate(name) if mark == "."))


PROMPTS = ("prompt", "question.full_text", "question.problem", "question.text", "question", "query", "problem", "input")
ANSWERS = ("completion", "response", "solution", "answer.0", "answer", "output")
"""A worked solution goes before the bare answer of the same row."""
JUDGED = ("preferred", "winner", "choice", "better_response_id", "preference")
MARGINS = ("margin", "preference_strength", "overall_preference")
TOOLS = ("tools", "functions")
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages",)},
    "sharegpt": {"conversations": ("conversations", "conversation")},
    "prompt-completion": {"prompt": PROMPTS, "completion": ANSWERS},
    "instruction": {"instruction": ("instruction",), "output": ("output", "response", "completion", "answer")},
    "text": {"text": ("text", "content")},
    "rated": {"prompt": PROMPTS, "completion": ANSWERS, "label": ("label", "kto_tag", "is_correct", "is_safe")},
    "preference": {"chosen": ("chosen", "response_j"), "rejected": ("rejected", "response_k")},
    "ranked": {
        "prompt": (*PROMPTS, "instruction", "context", "history", "info.post", "title"),
        "responses": ("responses", "completions", "answers.text", "answers", "summaries"),
    },
    "prompt": {"prompt": PROMPTS},
    "tool-calls": {"prompt": PROMPTS, "calls": ("calls", "answers", "tool_calls"), "tools": TOOLS},
}
"""Columns each format needs, formats in the order of trying: our name → its known names, ours first. A dot is a step
into a column, `[]` a list."""

OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "instruction": {"input": ("input", "context")},
    "preference": {"prompt": (*PROMPTS, "instruction", "trajectory")},
    "ranked": {
        "scores": ("scores", "ratings", "answers.score"),
        "ranks": ("ranks",),
        "preferred": JUDGED,
        "margin": MARGINS,
    },
    "prompt": {
        "answer": (
            "answer", "solution", "ground_truth", "reward_model.ground_truth", "question.ground_truth_answer",
            "expected_answer", "final_answer",
        ),
    },
}  # fmt: skip
"""Columns that a format takes where they are there."""

BESIDE: dict[str, tuple[str, ...]] = {"tools": TOOLS, "system": ("system", "system_prompt")}
"""Columns that go with a row of messages, whatever its format: rows of texts have no place for them."""

EARLIER = "history[]"  # column of earlier rounds, each a question and its answer, for a prompt that is a text
TALKS = ("messages", "sharegpt", "tool-calls")  # formats whose rows are always messages

_WHOLE = ("messages", "conversations", "conversation")

OTHERWISE: dict[str, tuple[dict[str, tuple[str, ...] | list[str]], ...]] = {
    "sharegpt": ({"conversations": ("dialog[]", "data[]")}, {"conversations": ("chat",), "system": ("system",)}),
    "prompt-completion": (
        {"prompt": ["context", "question"], "completion": ("answers.text.0",)},
        {
            "prompt": (*PROMPTS, "inputs", "document", "article", "dialogue"),
            "completion": (
                *ANSWERS, "targets", "target", "generated_solution", "canonical_solution", "best_answer", "long_answer",
                "code", "summary", "highlights",
            ),
        },
    ),
    "text": ({"text": ("raw_content", "whole_func_string", "code", "article", "document")},),
    "ranked": ({"responses": ()},),
    "rated": ({"completion": _WHOLE, "label": NEEDED["rated"]["label"]},),
    "prompt": ({"prompt": _WHOLE, "answer": OPTIONAL["prompt"]["answer"]},),
}  # fmt: skip
"""Columns for a format where none fits by `NEEDED`: a list of columns is joined. Rated conversations, and responses
that the recipe maps, hold their prompt."""

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
    "tool-calls": ("prompt", "completion"),
}
"""Columns of normalised rows of each format."""

LIKE: dict[str, str] = {
    "text": "text|body|content|document|article|story|passage",
    "prompt": "prompt|quest|^q$|query|ask|instruct|input|problem|user|human|message|convers|dialog",
    "completion": "complet|answer|^a$|respon|output|reply|solution|target|assistant|chosen|generat",
    "instruction": "instruct|prompt|quest|^q$|task",
    "output": "output|respon|answer|^a$|complet|reply",
    "messages": "messag|convers|dialog|chat|turns",
    "conversations": "convers|messag|dialog|chat|turns",
    "chosen": "chosen|prefer|better|best|good|win|accept|positive",
    "rejected": "reject|worse|worst|bad|los|negative",
    "responses": "respon|answer|complet|candidate|generat|summar|output",
    "label": "label|rating|is_|thumb|vote|good|correct",
    "calls": "call",
    "tools": "tool|function",
}
"""Our name → a pattern in unknown names that may mean the same, for hints."""
ASIDE = r"(id|uuid|lang|language|url|date|time|timestamp|index|idx|source|category|split|score|rank|count|hash|system)$"
"""Names of facts about a row."""
IN_ORDER = ("prompt-completion", "instruction", "text", "messages", "sharegpt", "prompt")
"""Formats whose columns may be guessed by their order: no side of them is worse than another."""
MANY = ("messages", "conversations", "responses", "calls", "tools")  # our columns that are lists

SIDE_BY_SIDE = ("responses", "scores", "ranks")
"""Our columns that are lists: several columns of the source make one, and are not joined."""

_STEMS = (
    "response", "answer", "completion", "output", "conversation", "human_ref", "summary", "candidate", "generation",
)  # fmt: skip
_ENDINGS = tuple(
    [f"{joint}{mark}" for mark in marks] for joint in ("_", "") for marks in ("12345678", "01234567", "abcdefgh")
)


def find_column(name: str, present: list[str], any_case: bool = True) -> str | None:
    """Returns the column or path of that name, whatever its case; None where there is none."""
    bare = name.removesuffix("[]")
    if bare in present:
        column = bare
    else:
        column = min((each for each in present if any_case and each.lower() == bare.lower()), default="")
    return column if column and (bare == name or f"{column}.0" in present) else None


def side_by_side(present: list[str], judged: bool = False) -> dict[str, str | list[str]] | None:
    """Returns columns of answers side by side (`response_1`, `response_2`), and, unless that is known, columns for
    which of them is better: scores or ranks of the same endings, or one column for all."""
    for stem in _STEMS:
        for endings in _ENDINGS:
            there = []
            for ending in endings:
                if (name := find_column(f"{stem}{ending}", present)) is None:
                    break
                there.append((ending, name))
            if len(there) < 2:
                continue
            responses: dict[str, str | list[str]] = {"responses": [name for _, name in there]}
            if judged:
                return responses
            for ours, names in (("preferred", JUDGED), ("margin", MARGINS)):
                if judge := next(filter(None, (find_column(name, present) for name in names)), None):
                    return responses | {ours: judge}
            for ours, forms in (
                ("scores", ("score{0}", "{1}{0}_score", "rating{0}", "winner_model{0}")),
                ("ranks", ("rank{0}", "{1}{0}_rank")),
            ):
                for form in forms:
                    judges = [name for ending, _ in there if (name := find_column(form.format(ending, stem), present))]
                    if len(judges) == len(there):
                        return responses | {ours: judges}
    return None


USUAL = ("sft", "dpo", "kto", "pretrain", "grpo")  # methods tried first among those that learn from the same rows


class Names(IntEnum):
    """Names by which columns are looked for, in this order."""

    OWN = 0  # ours, and those that the recipe maps
    COMMON = 1
    ANY = 2  # in any case, names that few data sets have, and answers side by side


@dataclass(frozen=True, kw_only=True)
class ColumnMapping:
    """Maps a source's columns and format to Baton's rows."""

    format: str
    # Our column name → the source's, or several that are joined; a missing one goes by our name.
    columns: Columns
    join: str = "\n\n"
    extra_columns: tuple[str, ...] = ()
    whole: bool = False  # the answers begin with their prompt, which has no column
    beside: Columns = field(default_factory=dict)  # go with a row of messages
    earlier: str | None = None  # column of the rounds before the prompt: rows are conversations then

    @property
    def needed(self) -> tuple[str, ...]:
        """Our names of the columns that every row has."""
        return tuple(name for name in NEEDED[self.format] if name != "prompt" or not self.whole)

    def name(self, ours: str) -> str:
        """Returns the source's name of a column, for messages."""
        theirs = self.columns.get(ours, ours)
        return repr(theirs) if isinstance(theirs, str) else " + ".join(map(repr, theirs))


def infer_mapping(source: DataSource, recipe: Recipe, present: list[str]) -> ColumnMapping:
    """Returns the layout of a source whose first rows have these columns, and paths within them.

    Without a named format, it is the first that the method learns from and whose columns are there by their own names
    or by `columns`, then by common names (`question` and `answer`, `query` and `response`, `instruction` and
    `response`, …), last by rare ones (`Names`). `input` is a prompt only where there is no `instruction`.

    Raises:
        UserError: the columns fit no format that the method learns from, a named one is not there, or a row is one
            message of a conversation.
    """
    data, spec = recipe.data, recipe.training.spec
    if not present:  # plain text, which has no columns
        return ColumnMapping(format="text", columns={"text": "text"}, join=data.join)
    mapped = data.columns if source.columns is None else source.columns
    named = source.format or data.format
    if named != "auto" and named not in spec.formats:
        raise UserError(
            f"data.source {source.uri!r} has format {named}, and {spec.name} learns from {' or '.join(spec.formats)}."
        )
    tried = [name for name in NEEDED if name in spec.formats] if named == "auto" else [named]
    for names in Names:
        for name in tried:
            if name == "text" and names is Names.ANY and len(tried) > 1:
                continue  # code or an article is text where nothing but text is learned
            columns = _found(name, mapped, present, names)
            if columns is not None:
                columns |= _optional(OPTIONAL.get(name, {}), mapped, present, columns, names)
                beside = {ours: columns[ours] for ours in BESIDE if ours in columns}
                beside |= _optional(BESIDE, mapped, present, columns, names)
                rounds = find_column(EARLIER, present) if {"prompt", "instruction"} & columns.keys() else None
                layout = ColumnMapping(
                    format=name,
                    columns=columns | (beside if name in TALKS else {}),
                    join=data.join,
                    extra_columns=tuple(data.extra_columns),
                    whole="prompt" in NEEDED[name] and "prompt" not in columns,
                    beside=beside,
                    earlier=rounds if rounds not in [*columns.values(), *data.extra_columns] else None,
                )
                _check_extras(layout, source, present)
                is_message = [column for column in ("role", "parent_id") if column in present]
                if is_message and name == "text" and named == "auto" and len(tried) > 1 and "text" not in mapped:
                    # One message a row, as OpenAssistant's are.
                    raise UserError(
                        f"data.source {source.uri!r} has one message a row ({', '.join(is_message)}), and not whole "
                        "conversations.",
                        remedy="Join the messages of each conversation to a row of messages, or set data.format: text "
                        "to train on each by itself.",
                    )
                return layout
    raise _unfit(source, named, spec, mapped, present)


def _found(name: str, mapped: Columns, present: list[str], names: Names) -> Columns | None:
    is_ranked = name == "ranked" and "responses" not in mapped
    judged = is_ranked and not OPTIONAL[name].keys().isdisjoint(mapped)
    if is_ranked and names is Names.ANY and (answers := side_by_side(present, judged)):
        prompt = _columns({"prompt": NEEDED[name]["prompt"]}, mapped, present, names)
        if prompt == {"prompt": "instruction"} and "input" in present and "prompt" not in mapped:
            prompt = {"prompt": ["instruction", "input"]}
        whole = any(str(response).lower().startswith("conversation") for response in answers["responses"])
        return answers if prompt is None and whole else prompt and prompt | answers
    if is_ranked and "labels" in present:
        return None  # steps with a label each are no answers to one prompt
    more = OTHERWISE.get(name, ()) if names is Names.ANY else ()
    shapes: tuple[Mapping[str, tuple[str, ...] | list[str]], ...] = (NEEDED[name], *more)
    for shape in shapes:
        joined: Columns = {
            ours: theirs for ours, theirs in shape.items() if isinstance(theirs, list) and ours not in mapped
        }
        if all(column in present for theirs in joined.values() for column in theirs):
            single = {ours: tuple(theirs) for ours, theirs in shape.items() if ours not in joined}
            if (columns := _columns(single, mapped, present, names)) is not None:
                return joined | columns
    return None


def _columns(
    needed: Mapping[str, tuple[str, ...]], mapped: Columns, present: list[str], names: Names
) -> Columns | None:
    columns: Columns = {}
    for ours, known in needed.items():
        theirs = _column(ours, known, mapped, present, names, taken=columns)
        if theirs is None:
            return None
        columns[ours] = theirs
    return columns


def _optional(
    taken: dict[str, tuple[str, ...]], mapped: Columns, present: list[str], assigned: Columns, names: Names
) -> Columns:
    """Returns the columns that are there, and those that the recipe maps: they may come later."""
    columns: Columns = {}
    for ours, known in taken.items():
        if ours not in assigned:
            theirs = mapped.get(ours) or _column(ours, known, {}, present, max(names, Names.COMMON), taken=assigned)
            if theirs is not None:
                columns[ours] = theirs
    return columns


def _column(
    ours: str, known: tuple[str, ...], mapped: Columns, present: list[str], names: Names, *, taken: Columns
) -> str | list[str] | None:
    if ours in mapped:
        theirs = mapped[ours]
        wanted = [theirs] if isinstance(theirs, str) else theirs
        return theirs if any(name in present for name in wanted) else None
    any_case = names is Names.ANY
    for name in known[:1] if names is Names.OWN else known:
        column = find_column(name, present, any_case)
        other_use = ours == "prompt" and name == "input" and find_column("instruction", present, any_case)
        if column and column not in taken.values() and not other_use:
            return column
    return None


def _check_extras(layout: ColumnMapping, source: DataSource, present: list[str]) -> None:
    for name in layout.extra_columns:
        if name not in present:
            raise missing_column("data.extra_columns", name, source.uri, present)
        if name in WRITTEN[layout.format] and layout.columns.get(name, name) != name:
            raise UserError(
                f"data.extra_columns: {name!r} is a column of {source.uri}, and the name of what comes out of "
                f"{layout.name(name)}; both cannot be kept.",
                remedy="Give the source's column another name.",
            )


def missing_column(setting: str, column: str, uri: str, present: list[str]) -> UserError:
    return UserError(
        f"{setting}: {column!r} is not a column of {uri}; its first rows have {', '.join(outermost_columns(present))}.",
        remedy=f"Change {setting}.",
    )


def _unfit(source: DataSource, named: str, spec: MethodSpec, mapped: Columns, present: list[str]) -> UserError:
    for ours, theirs in mapped.items():
        wanted = [theirs] if isinstance(theirs, str) else theirs
        if ours in {name for shape in NEEDED.values() for name in shape} and not set(wanted) & set(present):
            return missing_column(f"data.columns.{ours}", ", ".join(wanted), source.uri, present)
    allowed = spec.formats if named == "auto" else (named,)
    shapes = "; ".join(f"{name}: {', '.join(NEEDED[name])}" for name in allowed)
    fits = f"no format that {spec.name} learns from" if named == "auto" else "not the configured format"
    inner = {name for name in present if any(other.startswith(f"{name}.") for other in present)}
    lists = [name for name in inner if f"{name}.0" in present]
    # No place in a list is meant by it: `generations.0` is one of several.
    parts = [name for name in present if not any(step.isdecimal() for step in name.split("."))]
    free = [name for name in parts if name not in inner and name != "system" and not name.lower().endswith("id")]

    def proposed(name: str) -> Columns:
        columns = _there(name, mapped, present)
        known = {str(theirs) for theirs in columns.values()} | {*OPTIONAL.get(name, {})}
        _propose(
            name, columns, [each for each in parts if (each in free or each in lists) and each not in known], lists
        )
        return columns

    def likeness(name: str) -> tuple[float, float, bool, int]:
        needed, columns = NEEDED[name], proposed(name)
        filled = sum(columns[ours] != "…" for ours in needed) / len(needed)
        there = len(_there(name, mapped, present)) / len(needed)
        return there, filled, name in IN_ORDER, len(needed) if len(needed) <= len(free) else 0

    nearest = max(allowed, key=likeness)
    columns, matched = proposed(nearest), len(_there(nearest, mapped, present))
    example = ", ".join(f"{ours}: {columns[ours]}" for ours in NEEDED[nearest])
    if "ranked" in allowed and (answers := side_by_side(present, judged=True)):
        nearest, example = "ranked", f"responses: [{', '.join(answers['responses'])}], preferred: …"
    shape, others = learners(mapped, present)
    elsewhere = ""
    if named == "auto" and others and len(NEEDED[shape]) > matched:
        listed = f"{', '.join(others[:-1])} and {others[-1]}" if len(others) > 1 else others[0]
        elsewhere = f"Rows of {shape} are for {listed}: set training.method: {others[0]}. Or keep {spec.name}: "
    sentences = [name for name in present if re.search(r"[.?!]\s*$", name) or len(name.split()) > 6]
    header = ",".join(NEEDED[nearest])
    nearest = f"the nearest is {nearest}: map what holds it with data.columns, for example {{{example}}}."
    if sentences:
        elsewhere, nearest = "", f"the first line seems to be a row; put one with names before it, such as {header}."
    return UserError(
        f"data.source {source.uri!r} has columns {', '.join(outermost_columns(present))}, which fit {fits} ({shapes}).",
        remedy=elsewhere + (nearest if elsewhere else nearest[0].upper() + nearest[1:]),
    )


def _propose(name: str, columns: Columns, free: list[str], lists: list[str]) -> None:
    """Fills in the columns that a format lacks: by names alike, by their order where nothing else is left for them, and
    else not at all: whoever follows a hint that swaps columns trains backwards."""
    missing = [ours for ours in NEEDED[name] if ours not in columns]
    for ours in list(missing):
        like = [
            theirs
            for theirs in free
            if (theirs in lists) <= (ours in MANY or ours == "prompt")
            and any(re.search(LIKE[ours], step.lower()) for step in theirs.split("."))
            and not re.search(ASIDE, theirs.lower())
        ]
        if like:
            best = min(like, key=lambda theirs: not re.search(r"\.(text|content|value)$", theirs))
            columns[ours] = best
            free.remove(best)
            missing.remove(ours)
    left = [theirs for theirs in free if theirs not in lists and not re.search(ASIDE, theirs.lower())]
    fits = name in IN_ORDER and len(left) == len(missing)
    columns |= {ours: left[at] if fits else "…" for at, ours in enumerate(missing)}


def learners(mapped: Columns, present: list[str]) -> tuple[str, list[str]]:
    """Returns the format that takes most of the columns, and the methods that learn from it, the usual one first."""
    found = [
        (len(NEEDED[name]), -names, name)
        for name in NEEDED
        for names in Names
        if (name != "text" or names is not Names.ANY) and _found(name, mapped, present, names) is not None
    ]
    if not found:
        return "", []
    shape = max(found, key=lambda fit: fit[:2])[2]
    methods = [name for name, spec in SPECS.items() if shape in spec.formats]
    return shape, sorted(methods, key=lambda name: USUAL.index(name) if name in USUAL else len(USUAL))


def _there(name: str, mapped: Columns, present: list[str]) -> Columns:
    """Returns the columns that a format needs and that are there; of a mapping its text."""
    columns: Columns = {}
    for ours, known in NEEDED[name].items():
        if theirs := _column(ours, known, mapped, present, Names.ANY, taken=columns):
            columns[ours] = next((x for x in (f"{theirs}.text", f"{theirs}.content") if x in present), theirs)
    return columns


def require_one_shape(layouts: list[tuple[str, ColumnMapping]]) -> None:
    """Raises UserError where sources, given by address and layout, come out with different columns."""
    first_uri, first = layouts[0]
    for uri, layout in layouts[1:]:
        if WRITTEN[layout.format] != WRITTEN[first.format]:
            raise UserError(
                f"data.source: {first_uri} is {first.format} and {uri} is {layout.format}, which are not trained on "
                "together.",
                remedy="Bring them to one format, with data.columns or a source's own format and columns.",
            )
