"""`baton runs`: list the runs of a store, draw how they come from each other, and begin new ones at a checkpoint."""

from __future__ import annotations

import itertools
import os
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import local
from baton.cli.options import DEFAULT_STORE, Json, Overrides, answer, print_json
from baton.errors import UserError
from baton.recipe import load
from baton.runs import lineage
from baton.runs.documents import ForkNote
from baton.runs.lineage import Family, RunNode
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.terminal import Terminal

if TYPE_CHECKING:
    from baton.fork import Fork

app = typer.Typer(help="Lists runs, draws how they come from each other, and forks them.", no_args_is_help=True)

StoreOption = Annotated[
    str, typer.Option(help="Folder, s3://, gs:// or az:// bucket in which a run's name is looked up.")
]


@app.command("list")
def list_runs(store: StoreOption = DEFAULT_STORE, json: Json = False) -> None:
    """Lists the runs of a store, newest first: how far they are, and what they come from."""
    with answer(json):
        family = lineage.family(Storage(store))
        members = sorted((x for x in family.values() if x.state != "gone"), key=lambda x: x.created, reverse=True)
        if json:
            print_json({"runs": [asdict(member) for member in members]})
            return
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("run", "recipe", "state", "step", "comes from", "began"):
            table.add_column(heading, justify="right" if heading == "step" else "left", overflow="fold")
        for one in members:
            origin = f"{one.parent}: {one.words}" if one.parent else one.words
            table.add_row(one.name, one.recipe, one.state, _steps(one), origin, one.created[:16].replace("T", " "))
        Terminal().print(table)


@app.command("tree")
def tree(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name or STORE/runs/NAME: its family only.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Draws which run comes from which: forks, phases, retrainings, and trials of sweeps."""
    with answer(json):
        chosen = _run(run, store) if run else None
        family = lineage.family(chosen.storage if chosen else Storage(store))
        if chosen:
            if chosen.name not in family:
                raise UserError(f"{chosen.uri} does not exist.", remedy="`baton runs list` shows the runs of a store.")
            family = lineage.relatives(family, chosen.name)
        if json:
            print_json({"runs": [asdict(member) for _, member, _ in lineage.walk(family)]})
            return
        _print_tree(family, chosen.name if chosen else None)


@app.command("fork")
def fork(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="Name or STORE/runs/NAME, and a step; the newest when left out.")
    ],
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option("--run", help="Name of the new run.")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Keep the weights alone, from step 0; nearly all can then change.")
    ] = False,
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE.yaml", help="Where to write its recipe; NAME.yaml when left out.")
    ] = None,
    run_now: Annotated[bool, typer.Option("--run-now", help="Run it on this machine right away.")] = False,
    store: StoreOption = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Begins a new run at a checkpoint of another, with other settings.

    It keeps optimizer, schedule, random state and place in the data: with nothing changed it ends on its
    parent's bits. What a setting means for the rest is said; what cannot change is refused by name. The fork needs
    nothing of its parent, which may be deleted. `baton run FILE.yaml --run NAME`, or `baton submit`, trains it.
    """
    with answer(json):
        from baton import fork as forking

        address, separator, step = run.rpartition("@")
        if separator and not step.isdigit():
            raise UserError(f"{run!r} is not RUN or RUN@STEP, such as quickstart-1@40.")
        parent = _run(address or run, store)
        parent.require("recipe.json")
        taken = () if name else set(parent.storage.list("runs"))
        numbered = (f"{parent.name}-fork-{number}" for number in itertools.count(1))
        wanted = name or next(each for each in numbered if each not in taken)
        at = int(step) if separator else None
        path = recipe or f"{wanted}.yaml"
        if os.path.exists(path):
            raise UserError(f"{path!r} exists already.", remedy="Give another name by --recipe, or remove it.")
        with open(path, "x", encoding="utf-8") as file:  # first: no run is made whose recipe cannot be written
            try:
                made = forking.fork(parent, at, wanted, overrides or (), warm=not weights_only)
                file.write(load.to_yaml(made.recipe, as_written=True))
            except BaseException:
                os.remove(path)
                raise
        forked = {
            "run": wanted,
            "run_uri": made.run.uri,
            "parent": parent.uri,
            "step": made.step,
            "digest": made.digest,
            "warm": made.warm,
            "changed": made.run.need(ForkNote).changed,
            "recipe": os.path.abspath(path),
        }
        if not json:
            _tell(made, path)
        if not run_now:
            if json:
                print_json(forked)
            return
    local.run(path, run_name=wanted, json=json)


def _tell(made: Fork, path: str) -> None:
    carried = "optimizer, schedule, random state and data position kept" if made.warm else "weights alone, from step 0"
    typer.echo(f"run {made.run.name} at {made.run.uri}: fork of step {made.step}, {carried}")
    nothing = ["nothing is changed: it will end on its parent's bits"] if made.warm else []
    for line in made.lines or nothing:
        typer.echo(f"  {line}")
    command = f"{shlex.quote(path)} --run {made.run.name}"
    typer.echo(f"next:   baton run {command}   (on a cluster: baton submit {command})")


def _run(address: str, store: str) -> Run:
    return Run.open(address) if "/" in address else Run(Storage(store), address)


def _print_tree(family: Family, chosen: str | None) -> None:
    from rich.text import Text
    from rich.tree import Tree

    branches: dict[int, Tree] = {}
    sweeps: dict[str, Tree] = {}
    tops: list[Tree] = []
    for depth, member, _ in lineage.walk(family):
        label = Text.assemble(
            (member.name, "bold reverse" if member.name == chosen else "bold"),
            f"  {member.state} {_steps(member)}".rstrip(),
            (f"  {member.words}" if member.words else "", "dim"),
        )
        if depth:
            branches[depth] = branches[depth - 1].add(label)
        elif member.sweep:
            name = member.sweep[0]
            if name not in sweeps:
                sweeps[name] = Tree(Text(f"sweep {name}"))
                tops.append(sweeps[name])
            branches[0] = sweeps[name].add(label)
        else:
            branches[0] = Tree(label)
            tops.append(branches[0])
    for top in tops:
        Terminal().print(top)


def _steps(member: RunNode) -> str:
    if member.state == "gone":
        return ""
    reached = f"{member.step}/{member.num_steps}" if member.num_steps else str(member.step)
    return f"{reached}, {member.skips} skipped" if member.skips else reached
