"""The `baton` command, with all its subcommands."""

import typer

from baton.cli import data, demo, generate, kubeflow, local, options, prove, recipes, runs, sweep

app = typer.Typer(
    name="baton",
    cls=options.Commands,
    help="Train language models in chunks that hand on to each other without losing a bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
GROUPS = {
    "data": data.app,
    "import": recipes.import_app,
    "recipes": recipes.app,
    "runs": runs.app,
    "schedules": kubeflow.app,
    "sweep": sweep.app,
    "checkpoints": runs.checkpoints_app,
    "keys": runs.keys_app,
}
for name, group in GROUPS.items():
    app.add_typer(group, name=name, cls=options.Commands)
for command in (
    *(recipes.init, recipes.validate, recipes.schema, recipes.doctor, local.run, prove.prove, prove.audit, prove.drill),
    *(kubeflow.submit, kubeflow.status, kubeflow.cancel, kubeflow.retry, kubeflow.schedule, kubeflow.ci_report),
    *(generate.generate, local.retrain),
):
    app.command()(command)
app.command()(demo.demo)
app.command("compile")(recipes.compile_recipe)
