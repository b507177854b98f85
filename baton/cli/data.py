"""`baton data show` and `baton data check`: rows as the model sees them, and their problems on a page."""

import os
import re
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton import events
from baton.cli.display import Display, screen
from baton.cli.options import Json, Overrides, RecipePath, Trust, answer, default_page, page_path, print_json
from baton.errors import BatonError, UserError
from baton.kfp import processes
from baton.local.preview import preview
from baton.pages import quality_page
from baton.pages.quality_page import parts, tone
from baton.recipe import load
from baton.recipe.methods import SPECS
from baton.recipe.recipe import Recipe
from baton.runs.documents import Preview, PreviewRow
from baton.runs.run import Run
from baton.source import origin, prepare
from baton.store.storage import Storage
from baton.terminal import Terminal

LONGEST = 3000  # characters of a part of a row that are printed; the page has all
STYLES = {"trained": "green", "read": "dim", "cut": "strike red", "gap": "dim italic"}
TEXT_MARKS = {"trained": ("⟦", "⟧"), "cut": ("✂", "")}  # without colours: around trained tokens, before a cut


class Side(StrEnum):
    train = "train"
    eval = "eval"
    test = "test"


def show(
    recipe: RecipePath,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Rows to show.")] = 5,
    side: Annotated[Side | None, typer.Option(help="Show this side alone.")] = None,
    overrides: Overrides = None,
    page: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Page to write. Default: in STORE/pages.")
    ] = None,
    json: Json = False,
    trust: Trust = False,
) -> None:
    """Show the first rows as the model sees them: text, tokens, trained and cut parts.

    Reads and tokenizes these rows alone, with the run's own code; sources take turns. `baton data check` finds
    duplicates and other problems of all rows. Each phase of a recipe gets its own page.
    """
    with answer(json, trust):
        target = page_path(page) if page else None
        loaded = prepare.load(recipe, overrides).localised()
        target = target or default_page(loaded.store.uri, f"{loaded.name}-rows.html")
        stem, _, ending = target.rpartition(".")
        trainings = list(prepare.parts_of(loaded))
        results: list[dict[str, Any]] = []
        for training, name, has_tokenizer in trainings:
            if not has_tokenizer:  # the first phase learns it
                continue
            with Display(0) as display:
                seen = preview(training, rows, side, display.heard)
            file = f"{stem}{name}.{ending}"
            html = quality_page.render_preview(training.name, seen, training.training.spec.rows)
            Path(file).write_text(html, encoding="utf-8", errors="backslashreplace")
            document = seen.model_dump(mode="json")
            for row in document["rows"]:
                del row["spans"]  # they follow from the tokens
            results.append({"recipe": training.name, **document, "page": file})
            if not json:
                print_rows(Terminal(highlight=False), seen)
                typer.echo(f"page: {file}")
        if json:
            print_json(results[0] if len(results) == 1 else {"phases": results})


def print_rows(out: Console, seen: Preview) -> None:
    """Prints rows: in colours on a terminal, with marks elsewhere."""
    learned = (
        "trained" if all(row.side in ("train", None) for row in seen.rows) else "trained, or scored in held-out rows"
    )
    key = [(learned, "trained"), ("read, not trained", "read"), (f"cut at {seen.max_length:,} tokens", "cut")]
    out.print(Text(" · ").join(_marked(out, words, name) for words, name in key), soft_wrap=True)
    for row in quality_page.groups(seen.rows):
        out.print()
        _print_row(out, row)
    out.print()
    if seen.note:
        out.print(Text(seen.note, "yellow"), soft_wrap=True)
    out.print(Text(quality_page.preview_sentence(seen), "bold"), soft_wrap=True)


def _print_row(out: Console, row: list[PreviewRow]) -> None:
    shown = quality_page.shown(row)[0]
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
    before, after = TEXT_MARKS.get(name, ("", ""))
    return Text(f"{before}{words}{after}")


app = typer.Typer(help="Show and check rows before you rent a GPU", no_args_is_help=True)
RUN = "data-check"
Examined = dict[str, Any]  # see `examine`
PAGES = ("rejected_uri", "findings_uri", "report")  # addresses of the files that it writes
MARKS = {
    "failed": ("red", "✗ not allowed"),
    "warn": ("yellow", "! warning"),
    "fixed": ("green", "✓ fixed"),
    "ok": ("green", "✓ fine"),
    "off": ("dim", "– off"),
}


app.command()(show)


@app.command()
def check(
    source: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE… | RECIPE", help="Files, folders or URIs; or one recipe: path, name or -."),
    ],
    method: Annotated[str, typer.Option(help="Training method of the rows.")] = "sft",
    row_format: Annotated[str, typer.Option("--format", help="Format of a row, as data.format.")] = "auto",
    base: Annotated[str | None, typer.Option(help="Model whose tokenizer counts: hub id, folder or URI.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer that counts, without a model.")] = None,
    max_length: Annotated[int | None, typer.Option(min=8, help="Longest sequence in tokens.")] = None,
    overrides: Overrides = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE.html", help="Page to write. Default: in STORE/pages, or for rows in Baton's cache."),
    ] = None,
    json: Json = False,
    trust: Trust = False,
) -> None:
    """Check rows for duplicates, leaks, lengths and broken rows; write a page.

    Counts lengths where a tokenizer is known. Exit code 1 means a finding of a check set to `fail`, or more unusable
    rows than data.max_rejected allows. Each phase of a recipe gets its own page.
    """
    with answer(json, trust):
        target = page_path(report) if report else None
        is_recipe = len(source) == 1 and origin.is_recipe(source[0])
        if is_recipe:
            given = {"method": method != "sft", "format": row_format != "auto", "base": base, "tokenizer": tokenizer}
            for option in (option for option, value in given.items() if value):
                remedy = "Change it with --set."
                raise UserError(f"--{option} is for sources, not for a recipe.", remedy=remedy)
            changes = [*(overrides or ()), *([f"data.max_length={max_length}"] if max_length else [])]
            loaded = prepare.load(source[0], changes).localised()
            parts = list(prepare.parts_of(loaded))
            target = target or default_page(loaded.store.uri, f"{loaded.name}-quality.html")
        else:
            data: dict[str, Any] = {"source": source, "format": row_format}
            if max_length:
                data["max_length"] = max_length
            parts = [(_recipe_for(data, method, base, tokenizer, overrides or []), "", bool(base or tokenizer))]
            target = target or default_page(None, f"{parts[0][0].name}-quality.html")
        stem, _, ending = target.rpartition(".")
        with Display(0) as display:
            results = [
                examine(part, f"{stem}{name}.{ending}", counts=counts, display=display) for part, name, counts in parts
            ]
        if json:
            print_json(results[0] if len(results) == 1 else {"phases": results})
        for each in results if not json else []:
            print_examined(each)
        if any(each["state"] == "failed" for each in results):
            raise typer.Exit(1)


def examine(recipe: Recipe, page: str, *, counts: bool, display: Display) -> Examined:
    """Runs split and tokenize of a recipe in a temporary store; writes the page and its rows."""

    def heard(event: events.Event) -> None:
        if not isinstance(event, events.Rejected | events.Quality):  # they name files that are gone in a moment
            display.heard(event)

    with tempfile.TemporaryDirectory(prefix="baton-check-") as folder:
        run, error = Run(Storage(f"{folder}/store"), RUN), None
        checks = {f"data.quality.{name}": "warn" for name, value in recipe.data.quality if value == "fail"}
        # No check ends the run, so that every row is checked: the verdict comes at the end.
        lenient = {"store.uri": run.storage.uri(), "tracking.mlflow": None, "data.max_rejected": 1.0, **checks}
        file = Path(folder, "recipe.json")
        file.write_text(load.dumps(load.with_values(recipe, lenient)), encoding="utf-8")
        try:
            processes.run(processes.DATA_SPLIT, [str(file), RUN], heard)
            if counts:
                processes.run(processes.TOKENIZE, [run.uri], heard)
        except BatonError as raised:
            if run.raw(quality_page.QUALITY) is None:
                raise
            error = str(raised)  # of a stage that ended after the rows were checked
        result = {**quality_page.collect(run, recipe.data), "run": recipe.name}
        for key, name in (("findings_uri", quality_page.FINDINGS), ("rejected_uri", "rejected.jsonl")):
            beside = f"{page.rpartition('.')[0]}.{name}"
            result[key] = shutil.copyfile(path, beside) if os.path.exists(path := f"{run.uri}/{name}") else None
        html = quality_page.render(result, quality_page.seen(run))
    Path(page).write_text(html, encoding="utf-8")
    return {**result, "report": page, "error": error, "state": "failed" if error else result["state"]}


def _recipe_for(
    data: dict[str, Any], method: str, base: str | None, tokenizer: str | None, overrides: list[str]
) -> Recipe:
    model: dict[str, object] = {"base": base}
    if base is None:
        model = {
            "from_scratch": {},
            "tokenizer": {"base": tokenizer} if tokenizer else {"train": {"vocab_size": 300}},
        }
    least = SPECS[method].example if method in SPECS else None
    stem = os.path.basename(data["source"][0].partition("?")[0].rstrip("/")).partition(".")[0].lower()
    document = {
        "name": re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:60].strip("-") or RUN,
        "model": model,
        "data": data,
        "training": {"method": method, **({method: dict(least)} if least else {})},
    }
    recipe = load.validate(load.parse(document, overrides, origin="the options"), origin="the options")
    return prepare.LoadedRecipe(recipe, origin.RecipeSource("the options", "", os.getcwd())).localised()


def print_examined(result: Examined) -> None:
    """Prints the findings about rows for people."""
    table = Table(box=None, pad_edge=False, expand=True)
    titles = ("Check", "", "Found", "First" if any(each["examples"] for each in result["checks"]) else "")
    for title in titles:
        table.add_column(title, no_wrap=title == "First", overflow="ellipsis", ratio=1 if title == "First" else None)
    for each in result["checks"]:
        style, mark = MARKS[each["verdict"]]
        first = ""
        if each["examples"]:
            row = each["examples"][0]
            first = f"{row['reason']} ({os.path.basename(row['file'])} line {row['line']})"
        table.add_row(each["title"], Text(mark, style), each["told"], Text(first, "dim"))
    out = screen()
    out.print(Text(result["run"], "bold"))
    out.print(table)
    shares = [
        f"{'unclear' if code == 'und' else code} {quality_page.percent(share)}"
        for code, share in result["languages"].get("shares", [])[:4]
    ]
    if shares:
        out.print(f"languages: {', '.join(shares)}")
    if lengths := result["lengths"]:
        out.print(f"lengths:   {lengths['mean']:,.0f} tokens on average, {lengths['longest']:,} at most")
    elif not result["error"]:
        out.print("lengths:   not counted; give --base or --tokenizer")
    out.print(Text(result["sentence"], {"failed": "bold red", "warn": "yellow", "ok": "green"}[result["state"]]))
    if result["error"]:
        out.print(Text(result["error"], "bold red"))
    for key in PAGES:
        if result[key]:
            typer.echo(f"{key.removesuffix('_uri')}: {result[key]}")
