"""`baton data show`: the first rows as the model sees them."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from baton.components.shared.pages import rows_page
from baton.components.shared.pages.rows_page import parts, tone
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.rows import Seen, SeenRow
from baton.pipelines.cli.display import Display
from baton.pipelines.cli.options import Output, OutputOption, Overrides, RecipePath, page_path, print_json, reported
from baton.pipelines.compiling import prepare
from baton.pipelines.local import processes
from baton.pipelines.local.rows import HEAD
from baton.pipelines.local.terminal import Terminal

PREVIEW = "baton.components.tokenize.preview"
LEARNED = 1000
"""Rows that a tokenizer is trained on where the run trains one."""
LONGEST = 3000
"""Characters of a part of a row that are printed; the page has all."""
STYLES = {"trained": "green", "read": "dim", "cut": "strike red", "gap": "dim italic"}
MARKS = {"trained": ("⟦", "⟧"), "cut": ("✂", "")}
"""Around what is trained, and before what is cut, where there are no colours."""


class Side(StrEnum):
    """Side that rows are shown of."""

    train = "train"
    eval = "eval"
    test = "test"


def show(
    recipe: RecipePath,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Rows to show.")] = 5,
    side: Annotated[Side | None, typer.Option(help="Show rows of this side alone.")] = None,
    overrides: Overrides = None,
    page: Annotated[str, typer.Option(metavar="FILE.html", help="Page to write.")] = "data-rows.html",
    output: OutputOption = Output.text,
) -> None:
    """Shows the first rows as the model sees them: text, tokens, what is trained, what is cut and what is not used.

    Only these rows are read and tokenized, by what the run does it with. Sources take turns. What a run looks for in
    all rows, such as duplicates, is for `baton data check`. A recipe's phases have a page each.
    """
    with reported(output):
        stem, _, ending = page_path(page).rpartition(".")
        trainings = list(prepare.parts_of(prepare.load_here(recipe, overrides)))
        results: list[dict[str, Any]] = []
        for training, name, has_tokenizer in trainings:
            if not has_tokenizer:  # the first phase learns it
                continue
            with Display(0) as display:
                seen = look(training, rows, side, display)
            file = f"{stem}{name}.{ending}"
            html = rows_page.render(training.name, seen, training.training.spec.rows)
            Path(file).write_text(html, encoding="utf-8", errors="backslashreplace")
            results.append({"recipe": training.name, **as_json(seen), "page": file})
            if output is Output.text:
                print_rows(Terminal(highlight=False), seen)
                typer.echo(f"page: {file}")
        if output is Output.json:
            print_json(results[0] if len(results) == 1 else {"phases": results})


def look(recipe: Recipe, rows: int, side: str | None, display: Display) -> Seen:
    """Returns the first rows of a recipe as the model sees them.

    Args:
        recipe: The recipe, its paths absolute.
        rows: How many, those that cannot be used not counted.
        side: Whose; None for all.
        display: Shows how far it is.

    Raises:
        BatonError: the rows or the tokenizer cannot be had.
    """
    learns = recipe.model.tokenizer and recipe.model.tokenizer.train
    with tempfile.TemporaryDirectory(prefix="baton-show-") as folder:
        file = Path(folder, "recipe.json")
        file.write_text(recipe_file.dumps(recipe), encoding="utf-8")
        head, seen = f"{folder}/head.jsonl", f"{folder}/seen.json"
        count = max(rows, LEARNED) if learns else rows
        processes.run(HEAD, [str(file), str(count), side or "", head], display.heard)
        processes.run(PREVIEW, [str(file), head, str(rows), seen], display.heard)
        return Seen.read(Path(seen).read_bytes(), seen)


def as_json(seen: Seen) -> dict[str, Any]:
    """Returns rows as plain values; their spans follow from the tokens."""
    document = seen.model_dump(mode="json")
    for row in document["rows"]:
        del row["spans"]
    return document


def print_rows(out: Console, seen: Seen) -> None:
    """Prints rows: in colours on a terminal, with marks elsewhere."""
    key = [("trained", "trained"), ("read, not trained", "read"), (f"cut at {seen.max_length:,} tokens", "cut")]
    out.print(Text(" · ").join(_marked(out, words, name) for words, name in key), soft_wrap=True)
    for row in rows_page.groups(seen.rows):
        out.print()
        _print_row(out, row)
    out.print()
    if seen.note:
        out.print(Text(seen.note, "yellow"), soft_wrap=True)
    out.print(Text(rows_page.sentence(seen), "bold"), soft_wrap=True)


def _print_row(out: Console, row: list[SeenRow]) -> None:
    shown = rows_page.shown(row)[0]
    facts = [fact for fact in (shown.side, *shown.told) if fact]
    if shown.label is not None:
        facts.append(f"rated {'good' if shown.label else 'bad'}")
    out.print(Text(f"{shown.file} line {shown.line}", "bold") + Text(f"  {', '.join(facts)}", "dim"), soft_wrap=True)
    if shown.rejected:
        out.print(Text(f"not used: {shown.rejected}", "red"), soft_wrap=True)
    if not row[0].length:
        out.print(Text(row[0].text, "dim"), soft_wrap=True)
        return
    for name, spans, _ in parts(row):
        text, left = Text(f"{name}: " if name else "", "bold"), LONGEST
        for span in spans:
            words = span.text if len(span.text) <= left else f"{span.text[: max(left, 0)]} … "
            text.append_text(_marked(out, words, tone(span)))
            left -= len(span.text)
            if left <= 0:
                text.append("(the page has all of it)", "dim italic")
                break
        out.print(text, soft_wrap=True)
    for name, value in shown.columns.items():
        out.print(Text(f"{name}: ", "bold") + Text(value[:LONGEST], "dim"), soft_wrap=True)


def _marked(out: Console, words: str, name: str) -> Text:
    if out.is_terminal:
        return Text(words, STYLES[name])
    before, after = MARKS.get(name, ("", ""))
    return Text(f"{before}{words}{after}")
