"""`baton check`: recipe, rows, machine, store and cluster, before a GPU is rented."""

import tempfile
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.rule import Rule

from baton.cli import data, forecast, options, recipes
from baton.cli.display import Display, screen
from baton.errors import UserError
from baton.source import prepare
from baton.source.origin import RecipeSource


class Part(StrEnum):
    """Part of a check."""

    recipe = "recipe"
    rows = "rows"
    forecast = "forecast"
    machine = "machine"
    cluster = "cluster"


def check(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help=options.RECIPE_HELP, show_default=False)
    ] = None,
    only: Annotated[
        list[Part] | None, typer.Option("--only", help="Check this part alone. Repeatable.", show_default=False)
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Page about the rows to write.", show_default=False)
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Train 20 steps here to forecast time and price.")] = False,
    overrides: options.Overrides = None,
    store: options.Store = None,
    endpoint: options.Endpoint = None,
    namespace: options.Namespace = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Check recipe, rows, machine, store and cluster before a run.

    Checks what applies: without RECIPE, machine and store; a cluster where an endpoint is given. Rows are read and
    tokenized in a temporary store. The forecast follows an earlier run of the store, or --probe. Exit code: 0 ready,
    1 problems, 2 a mistake in the recipe.
    """
    with options.answer(json, trust):
        if overrides and not recipe:
            raise UserError("--set changes a recipe, and none is given.", remedy="Name the recipe.")
        wanted = set(only or Part)
        answer: dict[str, Any] = {"state": "ready"}
        problems: list[str] = []
        source: RecipeSource | None = None
        if recipe:
            # Always: a recipe that cannot be read has no rows, store or cluster to check.
            found = prepare.load(recipe, overrides, store=store)
            source = found.origin
            reports = recipes.reports_of(found)
            if Part.recipe in wanted:
                answer |= {**recipes.facts_of(found, reports), "state": "ready"}
                if not json:
                    _title("recipe")
                    recipes.print_reports(found, reports, on_cluster=bool(endpoint))
            if Part.rows in wanted:
                answer["data"] = rows = _rows(found, report)
                problems += [f"rows of {each['run']}" for each in rows if each["state"] == "failed"]
                for each in rows if not json else []:
                    _title("rows")
                    data.print_examined(each)
            is_single = not (found.recipe.phases or found.recipe.sweep)
            if probe or (Part.forecast in wanted and is_single):
                told = forecast.by_probe(found) if probe else forecast.by_earlier(found.localised())
                if told:
                    answer["forecast"] = told.to_json()
                    problems += [] if told.fits else ["budget"]
                if told and not json:
                    _title("forecast")
                    for line in forecast.in_words(found.recipe, told):
                        typer.echo(line)
        if Part.machine in wanted or (Part.cluster in wanted and endpoint):
            from baton import doctor

            checks = doctor.examine(source, overrides or (), store=store) if Part.machine in wanted else []
            if endpoint and Part.cluster in wanted:
                checks += doctor.examine_kubeflow(endpoint, namespace)
            answer["checks"] = doctor.examined(checks)["checks"]
            problems += [each.name for each in checks if each.state == "problem"]
            if not json:
                _title("machine, store and cluster" if endpoint else "machine and store")
                doctor.print_table(checks)
        if problems:
            answer["state"] = "problems"
        if json:
            options.print_json({**answer, "problems": problems})
        else:
            typer.secho(
                f"\nnot ready: {', '.join(problems)}" if problems else "\nready",
                fg=typer.colors.RED if problems else typer.colors.GREEN,
            )
        if problems:
            raise typer.Exit(1)


def _title(text: str) -> None:
    screen().print(Rule(text, align="left", style="dim"))


def _rows(found: prepare.LoadedRecipe, report: str | None) -> list[data.Examined]:
    """Returns the findings about the rows of each training; writes pages where a file is named."""
    page = options.page_path(report) if report else None
    with tempfile.TemporaryDirectory(prefix="baton-page-") as folder, Display(0) as display:
        stem, _, ending = (page or f"{folder}/rows.html").rpartition(".")
        results = [
            data.examine(part, f"{stem}{name}.{ending}", counts=counts, display=display)
            for part, name, counts in prepare.parts_of(found.localised())
        ]
    if page is None:
        for result in results:  # files of a folder that is removed
            result |= dict.fromkeys(data.PAGES)
    return results
