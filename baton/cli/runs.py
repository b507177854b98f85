"""`baton runs`, `checkpoints` and `keys`: show runs and what they hold, fork, prune, merge, sign and verify."""

import itertools
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from json import dump, dumps
from typing import Annotated, TypeVar

import typer
from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from baton import fork as forking
from baton.api import checkpoints, chosen_checkpoint, chunks_of, existing_run
from baton.checkpoint import retention
from baton.checkpoint.proof import SignatureReport, Verification
from baton.checkpoint.signatures import SIGNATURE
from baton.checkpoint.store import Checkpoint, CheckpointStore, merge_model
from baton.cli import local
from baton.cli.options import DEFAULT_STORE, Json, Overrides, RunUri, answer, print_json
from baton.errors import UserError
from baton.local import results
from baton.recipe import load
from baton.runs import lineage
from baton.runs.documents import ForkNote
from baton.runs.run import Run
from baton.signing import KEY_FILE, PublicKey, Signer
from baton.store.clouds import ANY_BUCKET
from baton.store.storage import Storage
from baton.terminal import Terminal

app = typer.Typer(help="Lists runs, draws how they come from each other, and forks them.", no_args_is_help=True)

StoreOption = Annotated[str, typer.Option(help=f"Folder, {ANY_BUCKET} bucket in which a run's name is looked up.")]


@app.command("list")
def list_runs(store: StoreOption = DEFAULT_STORE, json: Json = False) -> None:
    """Lists the runs of a store, newest first: how far they are, and what they come from."""
    with answer(json):
        family = lineage.family(Storage(store))
        members = sorted((x for x in family.values() if x.state != "gone"), key=lambda x: x.created, reverse=True)
        if json:
            print_json({"runs": [asdict(member) for member in members]})
            return
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


def _tell(made: forking.Fork, path: str) -> None:
    carried = "optimizer, schedule, random state and data position kept" if made.warm else "weights alone, from step 0"
    typer.echo(f"run {made.run.name} at {made.run.uri}: fork of step {made.step}, {carried}")
    nothing = ["nothing is changed: it will end on its parent's bits"] if made.warm else []
    for line in made.lines or nothing:
        typer.echo(f"  {line}")
    command = f"{shlex.quote(path)} --run {made.run.name}"
    typer.echo(f"next:   baton run {command}   (on a cluster: baton submit {command})")


def _run(address: str, store: str) -> Run:
    return Run.open(address) if "/" in address else Run(Storage(store), address)


def _print_tree(family: lineage.Family, chosen: str | None) -> None:
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


def _steps(member: lineage.RunNode) -> str:
    if member.state == "gone":
        return ""
    reached = f"{member.step}/{member.num_steps}" if member.num_steps else str(member.step)
    return f"{reached}, {member.skips} skipped" if member.skips else reached


checkpoints_app = typer.Typer(help="Shows the checkpoints of a run, and checks every byte.", no_args_is_help=True)
CheckpointRow = TypeVar("CheckpointRow", results.Listed, results.VerifiedCheckpoint)
Chosen = Annotated[
    str, typer.Argument(metavar="RUN_URI[@STEP]", help="STORE/runs/NAME, and a step; the newest when left out.")
]


@checkpoints_app.command("list")
def list_checkpoints(run_uri: RunUri, json: Json = False) -> None:
    """Lists the committed checkpoints of a run."""
    with answer(json):
        _print_rows(json, list(checkpoints(run_uri)), _listed)


@checkpoints_app.command("show")
def show_checkpoint(
    run_uri: RunUri,
    step: Annotated[int | None, typer.Option(help="Step; the newest when left out.")] = None,
    json: Json = False,
) -> None:
    """Shows all that a checkpoint's manifest says."""
    with answer(json):
        store = CheckpointStore(existing_run(run_uri))
        checkpoint = chosen_checkpoint(store, step)
        document = {"step": checkpoint.step, "uri": store.uri(checkpoint), **asdict(checkpoint.manifest)}
        print_json(document) if json else typer.echo(dumps(document, indent=2))


@checkpoints_app.command("prune")
def prune_checkpoints(
    run_uri: RunUri,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would go, and take nothing.")] = False,
    json: Json = False,
) -> None:
    """Removes the checkpoints that the recipe's chunks.keep does not hold."""
    with answer(json):
        run = existing_run(run_uri)
        store, keep, targets = CheckpointStore(run), chunks_of(run).keep, run.plan().targets
        if not dry_run and run.storage.cannot_remove:
            raise run.storage.cannot_remove
        take = retention.removals if dry_run else retention.prune
        rows = retention.summary(take(store, keep, targets=targets))
        if json:
            print_json({"dry_run": dry_run, "removed": [row.to_json() for row in rows]})
            return
        for row in rows:
            typer.echo(f"step {row.step:>8}  {row.bytes / 1e6:8.1f} MB  {row.reason}")
        freed = sum(row.bytes for row in rows) / 1e6
        typer.echo(f"{'would free' if dry_run else 'freed'} {freed:.1f} MB in {len(rows)} removal(s)")


@checkpoints_app.command("merge")
def merge_checkpoint(
    run_uri: Chosen,
    folder: Annotated[str, typer.Option("--output", metavar="FOLDER", help="Where to write the model; a new folder.")],
    shard_size: Annotated[str, typer.Option(help="Largest file of weights, which is what memory holds.")] = "5GB",
    json: Json = False,
) -> None:
    """Writes the model of a checkpoint in shards as safetensors that `from_pretrained` reads, every byte checked."""
    with answer(json):
        made = merge_model(*chosen(run_uri), folder, shard_size)
        if json:
            print_json(made)
        elif made["was_sharded"]:
            typer.echo(f"step {made['step']}: {made['bytes'] / 1e6:.1f} MB of weights in {made['folder']}")
        else:
            typer.echo(f"step {made['step']} is whole already: {made['uri']} is what from_pretrained reads")


def chosen(address: str) -> tuple[CheckpointStore, Checkpoint]:
    """Returns a checkpoint by `RUN_URI[@STEP]`, the newest without a step."""
    uri, separator, step = address.rpartition("@")
    is_step = bool(separator) and step.isdigit()
    store = CheckpointStore(existing_run(uri if is_step else address))
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


def _print_rows(json: bool, rows: list[CheckpointRow], line: Callable[[CheckpointRow], str]) -> None:
    if json:
        print_json({"checkpoints": rows})
        return
    for row in rows:
        typer.echo(f"step {row['step']:>8}  {line(row)}")


keys_app = typer.Typer(help="Makes keys that checkpoints are signed with.", no_args_is_help=True)


class Kind(StrEnum):
    ed25519 = "ed25519"
    p256 = "p256"


KeyFile = Annotated[str, typer.Argument(metavar="FILE", help="The private key's file; the public one is FILE.pub.")]


@keys_app.command()
def new(
    file: KeyFile,
    kind: Annotated[
        Kind, typer.Option(help="p256 is ECDSA on P-256, the kind that sigstore's model-signing verifies.")
    ] = Kind.ed25519,
    json: Json = False,
) -> None:
    """Makes a private key that only you may read, and its public key beside it."""
    with answer(json):
        signer = Signer.new("p256" if kind is Kind.p256 else "ed25519")
        # The private one first, and neither over another: a key that is lost is a run that nobody continues.
        _write(file, signer.pem(), 0o600)
        _write(f"{file}.pub", signer.public.pem, 0o644)
        _tell_key(json, file, signer.public)


@keys_app.command()
def show(file: KeyFile, json: Json = False) -> None:
    """Prints the public key that belongs to a private or public one."""
    with answer(json):
        _tell_key(json, file, read_public(file))


def read_public(file: str) -> PublicKey:
    """Returns the public key in a file with a public or private one."""
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
        return Signer.read(file).public if "PRIVATE KEY" in text else PublicKey.parse(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"key {file!r} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}."
        ) from None
    except ValueError as error:
        raise UserError(f"key {file!r} {error}.") from None


def _write(path: str, data: bytes, mode: int) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    except FileExistsError:
        raise UserError(f"{path!r} exists.", remedy="Name another file: keys are never replaced.") from None


def _tell_key(json: bool, file: str, public: PublicKey) -> None:
    if json:
        print_json({"file": os.path.abspath(file), "public_key": public.line, "name": public.hint})
        return
    typer.echo(f"public key {public.name}; in the recipe:")
    typer.echo(f"  chunks: {{signing: {{public_key: {public.line}}}}}")
    typer.echo(f"to sign: {KEY_FILE}={shlex.quote(os.path.abspath(file.removesuffix('.pub')))}")


@checkpoints_app.command()
def verify(
    run_uri: RunUri,
    key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Public key by which every checkpoint must be signed.")
    ] = None,
    expect_step: Annotated[
        int | None, typer.Option(help="With --key: step that the run had come to, as you wrote it down.")
    ] = None,
    expect_digest: Annotated[
        str | None,
        typer.Option(metavar="SHA256", help="With --key: that step's manifest, as this command printed it then."),
    ] = None,
    json: Json = False,
) -> None:
    """Reads every checkpoint back, compares all hashes, and checks that they continue each other.

    With --key each must be what that key has signed, file by file and field by field, with the parent that it was
    signed with.
    """
    with answer(json):
        if key is None and (expect_step is not None or expect_digest is not None):
            raise UserError("--expect-step and --expect-digest need --key: without a signature a digest says nothing.")
        if expect_digest is not None and not re.fullmatch("[0-9a-f]{64}", expect_digest):
            raise UserError(f"--expect-digest {expect_digest!r} is not a SHA-256 of 64 hexadecimal digits.")
        run = existing_run(run_uri)
        if key is None:
            rows = results.verify_checkpoints(run)
            _print_rows(json, rows, lambda row: _found(row["problems"]))
            is_well = all(row["ok"] for row in rows)
        else:
            store = CheckpointStore(run)
            verdict = Verification(store, read_public(key)).verdict(expect_step, expect_digest)
            print_json({**verdict}) if json else _print(verdict)
            is_well = verdict["ok"]
        if not is_well:
            raise typer.Exit(1)


@checkpoints_app.command()
def signature(
    checkpoint: Chosen,
    file: Annotated[str, typer.Option("--output", metavar="FILE", help="Where to write it; outside the checkpoint.")],
    json: Json = False,
) -> None:
    """Writes a checkpoint's signature as a sigstore bundle, for `model_signing verify key` and other tools."""
    with answer(json):
        store, found = chosen(checkpoint)
        bundle = found.manifest.meta.get(SIGNATURE)
        if bundle is None:
            raise UserError(f"the checkpoint of step {found.step} is not signed.")
        with open(file, "w", encoding="utf-8") as opened:
            dump(bundle, opened)
        written = {"file": os.path.abspath(file), "step": found.step, "uri": store.uri(found)}
        print_json(written) if json else typer.echo(f"{written['file']} signs the files of {written['uri']}")


def _print(verdict: SignatureReport) -> None:
    for row in verdict["checkpoints"]:
        typer.echo(f"step {row['step']:>8}  {_found(row['problems'], 'signed, whole')}")
    for problem in verdict["problems"]:
        typer.echo(f"the run: {problem}")
    for note in verdict["notes"]:
        typer.echo(f"note: {note}")
    if head := verdict["head"]:
        typer.echo(f"newest: step {head['step']}, manifest {head.get('manifest')}")
    if not verdict["checkpoints"]:
        typer.echo("there is no checkpoint")


def _found(problems: list[str], well: str = "whole") -> str:
    return f"DAMAGED: {'; '.join(problems)}" if problems else well
