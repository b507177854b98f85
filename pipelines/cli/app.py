"""The `baton` command."""

from __future__ import annotations

import typer

from baton.pipelines.cli import (
    data,
    drill,
    imports,
    init,
    kubeflow,
    local,
    options,
    prove,
    recipes,
    retrain,
    runs,
    schedule,
    sweep,
    trust,
    use,
)

app = typer.Typer(
    name="baton",
    cls=options.Commands,
    help="Train language models in chunks that hand on to each other without losing a bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(data.app, name="data")
app.add_typer(imports.app, name="import")
app.add_typer(recipes.app, name="recipes")
app.add_typer(runs.app, name="runs")
app.add_typer(schedule.app, name="schedules")
app.add_typer(sweep.app, name="sweep")

app.command()(init.init)
app.command()(recipes.validate)
app.command()(recipes.schema)
app.command()(recipes.doctor)
app.command("compile")(recipes.compile_recipe)
app.command()(local.run)
app.command()(prove.prove)
kubeflow.add_to(app)
trust.add_to(app)
app.command()(drill.drill)
app.command()(use.generate)
app.command()(retrain.retrain)
app.command()(retrain.outcome)
app.command()(schedule.schedule)

READING = {
    "outcome": "it reads a recipe's name and store, and runs nothing of it",
    "runs fork": "it writes a recipe, of a run that it is to begin in the same store",
}
"""Command with a recipe → why it has no `--trust`."""
options.give_trust(app, READING)
options.give_json(app)
