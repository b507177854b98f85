"""`baton schedule` and `baton schedules`: retraining by the clock, as a recurring run of Kubeflow Pipelines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from baton.pipelines.api import cluster
from baton.pipelines.cli import options
from baton.pipelines.cli.display import note
from baton.pipelines.cli.options import Output, OutputOption, print_json, reported
from baton.pipelines.cli.submit import load_for_pods
from baton.pipelines.compiling.package import Pipeline

app = typer.Typer(help="Retraining by the clock.", no_args_is_help=True)


def schedule(
    recipe: options.RecipePath,
    endpoint: options.Endpoint,
    cron: Annotated[
        str, typer.Option(metavar="LINE", help="When: minute, hour, day, month, weekday, as in '0 3 * * *', or @daily.")
    ],
    namespace: options.Namespace = None,
    service_account: options.ServiceAccount = None,
    registers: options.Registers = True,
    overrides: options.Overrides = None,
    store: options.Store = None,
    chunks: options.ChunkCount = None,
    image: options.Image = None,
    output: OutputOption = Output.text,
) -> None:
    """Retrains a recipe's model by the clock, where its data or the recipe have changed.

    It takes the place of an earlier schedule of the recipe. The times are those of Kubeflow's clock: UTC, unless its
    administrator has set another.
    """
    with reported(output):
        from baton.pipelines.kubeflow import endpoint as connection
        from baton.pipelines.kubeflow import schedule as recurring

        line = recurring.cron_line(cron)
        loaded = load_for_pods(recipe, overrides, store, chunks, image)
        with cluster.packaged_for(loaded, endpoint, Pipeline.retrain, note) as package:
            made = recurring.create(
                package,
                endpoint,
                recipe=loaded.name,
                cron=line,
                token=connection.token(),
                namespace=namespace,
                service_account=service_account,
                registers=registers,
                tell=note,
            )
        if output is Output.json:
            print_json(asdict(made))
        else:
            typer.echo(f"{made.recipe} is retrained at '{made.cron}' ({made.identifier})")
            typer.echo(f"times are those of Kubeflow's clock: {recurring.CLOCK}")


@app.command("list")
def list_command(
    endpoint: options.Endpoint, namespace: options.Namespace = None, output: OutputOption = Output.text
) -> None:
    """Lists the schedules that there are."""
    with reported(output):
        from baton.pipelines.kubeflow import endpoint as connection
        from baton.pipelines.kubeflow import schedule as recurring

        schedules = recurring.find(endpoint, token=connection.token(), namespace=namespace)
        if output is Output.json:
            print_json({"schedules": [asdict(each) for each in schedules]})
            return
        for each in schedules:
            state = "enabled" if each.is_enabled else "disabled"
            typer.echo(f"{each.recipe}\t{each.cron}\t{state}\t{each.identifier}")
        if schedules:
            typer.echo(f"times: {recurring.CLOCK}", err=True)


@app.command("delete")
def delete_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.", show_default=False)],
    endpoint: options.Endpoint,
    namespace: options.Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """Deletes the schedule of a recipe; a run that is under way continues."""
    with reported(output):
        from baton.pipelines.kubeflow import endpoint as connection
        from baton.pipelines.kubeflow import schedule as recurring

        schedules = recurring.delete(endpoint, name, token=connection.token(), namespace=namespace)
        if output is Output.json:
            print_json({"deleted": [asdict(each) for each in schedules]})
        else:
            typer.echo(f"{name} is not retrained by the clock any more")
