"""The `baton` command, with all its subcommands.

Some of them need no trust in a run: checkpoints shown and verified, keys, signatures, an audit.
"""

from __future__ import annotations

import typer

from baton.cli import checkpoints, data, generate, init, kubeflow, local, options, prove, recipes, runs, sweep

# --- What a stranger need not take on trust: checkpoints looked at and verified, keys, signatures, an audit.


def add_trust_commands(app: typer.Typer) -> None:
    """Adds these commands to `baton`."""
    checkpoints.app.command()(checkpoints.verify)
    checkpoints.app.command()(checkpoints.signature)
    app.add_typer(checkpoints.app, name="checkpoints")
    app.add_typer(checkpoints.keys_app, name="keys")
    app.command()(prove.audit)


# --- The `baton` command.


app = typer.Typer(
    name="baton",
    cls=options.Commands,
    help="Train language models in chunks that hand on to each other without losing a bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(data.app, name="data")
app.add_typer(init.import_app, name="import")
app.add_typer(recipes.app, name="recipes")
app.add_typer(runs.app, name="runs")
app.add_typer(kubeflow.app, name="schedules")
app.add_typer(sweep.app, name="sweep")

app.command()(init.init)
app.command()(recipes.validate)
app.command()(recipes.schema)
app.command()(recipes.doctor)
app.command("compile")(recipes.compile_recipe)
app.command()(local.run)
app.command()(prove.prove)
kubeflow.add_run_commands(app)
add_trust_commands(app)
app.command()(prove.drill)
app.command()(generate.generate)
app.command()(local.retrain)
app.command()(local.outcome)
app.command()(kubeflow.schedule)

READING = {
    "outcome": "it reads a recipe's name and store, and runs nothing of it",
    "runs fork": "it writes a recipe, of a run that it is to begin in the same store",
}
"""Command with a recipe → why it has no `--trust`."""
options.give_trust(app, READING)
options.give_json(app)
