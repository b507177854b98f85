"""The `baton` command."""

from __future__ import annotations

import typer

from baton.pipelines.cli import (
    data,
    data_show,
    drill,
    imports,
    kubeflow,
    local,
    prove,
    recipes,
    retrain,
    runs,
    schedule,
    submit,
    sweep,
    trust,
    use,
)

app = typer.Typer(
    name="baton",
    help="Train language models in chunks that hand on to each other without losing a bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data.app.command()(data_show.show)
app.add_typer(data.app, name="data")
app.add_typer(imports.app, name="import")
app.add_typer(runs.app, name="runs")
app.add_typer(schedule.app, name="schedules")
app.add_typer(sweep.app, name="sweep")

app.command()(recipes.validate)
app.command()(recipes.schema)
app.command()(recipes.doctor)
app.command("compile")(recipes.compile_recipe)
app.command()(local.run)
app.command()(prove.prove)
trust.add_to(app)
app.command()(submit.submit)
app.command()(kubeflow.status)
app.command()(kubeflow.cancel)
app.command()(kubeflow.retry)
app.command()(drill.drill)
app.command()(use.generate)
app.command()(use.serve)
app.command()(retrain.retrain)
app.command()(retrain.outcome)
app.command()(schedule.schedule)
