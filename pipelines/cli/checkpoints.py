"""`baton checkpoints`: look at the checkpoints of a run, and check every byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, TypeVar

import typer

from baton.components.shared.checkpoints import merging, retention
from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.errors import UserError
from baton.pipelines.api.checkpoints import checkpoints, chunks_of, existing
from baton.pipelines.api.checkpoints import chosen as of_step
from baton.pipelines.cli.options import Output, OutputOption, RunUri, as_json, print_json, reported
from baton.pipelines.local import results

app = typer.Typer(help="Shows the checkpoints of a run, and checks every byte.", no_args_is_help=True)

Row = TypeVar("Row", results.Listed, results.Verified)
Chosen = Annotated[
    str, typer.Argument(metavar="RUN_URI[@STEP]", help="STORE/runs/NAME, and a step; the newest when left out.")
]


@app.command("list")
def list_checkpoints(run_uri: RunUri, output: OutputOption = Output.text) -> None:
    """Lists the committed checkpoints of a run."""
    with reported(output):
        answer(output, list(checkpoints(run_uri)), _listed)


@app.command("show")
def show_checkpoint(
    run_uri: RunUri,
    step: Annotated[int | None, typer.Option(help="Step; the newest when left out.")] = None,
    output: OutputOption = Output.text,
) -> None:
    """Shows all that a checkpoint's manifest says."""
    with reported(output):
        store = CheckpointStore(existing(run_uri))
        checkpoint = of_step(store, step)
        document = {"step": checkpoint.step, "uri": store.uri(checkpoint), **asdict(checkpoint.manifest)}
        print_json(document) if output is Output.json else typer.echo(json.dumps(document, indent=2))


@app.command("prune")
def prune_checkpoints(
    run_uri: RunUri,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go, and take nothing.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Removes the checkpoints that the recipe's chunks.keep does not hold."""
    with reported(output):
        run = existing(run_uri)
        store, keep, targets = CheckpointStore(run), chunks_of(run).keep, run.plan().targets
        if not dry_run and run.storage.cannot_remove:
            raise run.storage.cannot_remove
        take = retention.removals if dry_run else retention.prune
        rows = retention.summary(take(store, keep, targets=targets))
        if output is Output.json:
            print_json({"dry_run": dry_run, "removed": [row.to_json() for row in rows]})
            return
        for row in rows:
            typer.echo(f"step {row.step:>8}  {row.bytes / 1e6:8.1f} MB  {row.reason}")
        freed = sum(row.bytes for row in rows) / 1e6
        typer.echo(f"{'would free' if dry_run else 'freed'} {freed:.1f} MB in {len(rows)} removal(s)")


@app.command("merge")
def merge_checkpoint(
    run_uri: Chosen,
    folder: Annotated[str, typer.Option("--output", metavar="FOLDER", help="Where to write the model; a new folder.")],
    shard_size: Annotated[str, typer.Option(help="Largest file of weights, which is what memory holds.")] = "5GB",
) -> None:
    """Writes the model of a checkpoint in shards as safetensors that `from_pretrained` reads, every byte checked."""
    with reported():
        made = merging.merge(*chosen(run_uri), folder, shard_size)
        if as_json():
            print_json(made)
        elif made["was_sharded"]:
            typer.echo(f"step {made['step']}: {made['bytes'] / 1e6:.1f} MB of weights in {made['folder']}")
        else:
            typer.echo(f"step {made['step']} is whole already: {made['uri']} is what from_pretrained reads")


def chosen(address: str) -> tuple[CheckpointStore, Checkpoint]:
    """Returns a checkpoint by the run's address and a step after an @, the newest without one.

    Raises:
        UserError: there is none.
    """
    uri, separator, step = address.rpartition("@")
    is_step = bool(separator) and step.isdigit()
    store = CheckpointStore(existing(uri if is_step else address))
    for checkpoint in store.committed():
        if not is_step or checkpoint.step == int(step):
            return store, checkpoint
    raise UserError(
        f"run {store.run.uri!r} has no whole checkpoint{f' of step {step}' if is_step else ''}.",
        remedy="`baton checkpoints list` shows those that it has.",
    )


def _listed(row: results.Listed) -> str:
    skips = ", ".join(map(str, row.get("skips", [])))
    note = f"  without step {skips}" if skips else ""
    return row.get("problem") or f"{row['digest'][:16]}  {row['bytes'] / 1e6:8.1f} MB  {row['uri']}{note}"


def answer(output: Output, rows: list[Row], line: Callable[[Row], str]) -> None:
    """Prints a line for each checkpoint, or all of them as one object."""
    if output is Output.json:
        print_json({"checkpoints": rows})
        return
    for row in rows:
        typer.echo(f"step {row['step']:>8}  {line(row)}")
