"""The `baton` command, with all its subcommands."""

from collections.abc import Callable
from typing import Annotated

import typer

from baton.cli import check, data, demo, generate, kubeflow, local, options, prove, recipes, runs, status, sweep, watch
from baton.cli.display import Verbosity

app = typer.Typer(
    name="baton",
    cls=options.TopCommands,
    help="Train LLMs on spot GPUs: a killed run resumes and ends bit-identical.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def baton(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=options.print_version),
    ] = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Train LLMs on spot GPUs: a killed run resumes and ends bit-identical."""
    Verbosity.reset(quiet=quiet, verbose=verbose)


START: dict[str, Callable[..., None]] = {
    "init": recipes.init,
    "check": check.check,
    "run": local.run,
    "demo": demo.demo,
    "generate": generate.generate,
}
RUNS: dict[str, Callable[..., None]] = {
    "status": status.status,
    "logs": status.logs,
    "open": status.open_page,
    "watch": watch.watch,
    "stop": status.stop,
    "retry": status.retry,
    "diff": status.diff,
}
GROUPS = {
    "runs": runs.app,
    "sweep": sweep.app,
    "data": data.app,
    "verify": prove.app,
    "kfp": kubeflow.app,
    "recipe": recipes.app,
}
HIDDEN: dict[str, Callable[..., None]] = {  # commands of earlier releases, see `options.MOVED`
    "validate": recipes.validate,
    "doctor": recipes.doctor,
    "schema": recipes.schema,
    "prove": prove.prove,
    "audit": prove.audit,
    "drill": prove.drill,
    "submit": kubeflow.submit,
    "cancel": status.stop,
    "schedule": kubeflow.schedule,
    "ci-report": kubeflow.ci_report,
    "outcome": kubeflow.ci_report,
    "retrain": local.retrain,
    "compile": kubeflow.compile_recipe,
}
HIDDEN_GROUPS = {
    "import": recipes.import_app,
    "recipes": recipes.former_app,
    "schedules": kubeflow.schedules_app,
    "checkpoints": runs.checkpoints_app,
    "keys": runs.keys_app,
}

for panel, commands in {"Start": START, "Runs": RUNS}.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
for name, command in HIDDEN.items():
    app.command(name, hidden=True)(command)
for name, group in GROUPS.items():
    kind = prove.Checks if name == "verify" else options.Commands
    app.add_typer(group, name=name, cls=kind, rich_help_panel="Groups")
for name, group in HIDDEN_GROUPS.items():
    app.add_typer(group, name=name, cls=options.Commands, hidden=True)


def _finish(group: typer.Typer) -> None:
    """Gives each command of a group -q, -v and plain help."""
    for info in group.registered_commands:
        assert info.callback
        info.cls, info.callback = options.Command, options.with_verbosity(info.callback)


for group in (app, *GROUPS.values(), *HIDDEN_GROUPS.values()):
    _finish(group)
