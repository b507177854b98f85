"""`baton runs`: list, show, remove, fork, prune and merge. Also checks of checkpoints, exports, keys for `verify`."""

import contextlib
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import StrEnum
from json import dump, dumps
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from baton import fork as forking
from baton.api import checkpoints, chosen_checkpoint, chunks_of
from baton.checkpoint import chain, retention
from baton.checkpoint.proof import SignatureReport, Verification
from baton.checkpoint.store import Checkpoint, CheckpointStore, merge_model
from baton.cli import address, local
from baton.cli.address import RunArgument, StepArgument, StoreOption
from baton.cli.display import print_table
from baton.cli.options import DEFAULT_STORE, Json, Overrides, answer, print_json
from baton.errors import UserError
from baton.local import begun, results
from baton.recipe import load
from baton.runs import lineage, removal
from baton.runs.documents import ForkNote
from baton.runs.outcomes import ExportedModel
from baton.runs.run import Sweep
from baton.signing import KEY_FILE, SIGNATURE, PublicKey, Signer
from baton.terminal import Terminal

app = typer.Typer(help="List, show, remove, fork and prune runs", no_args_is_help=True)


@app.command("list")
def list_runs(store: StoreOption = DEFAULT_STORE, json: Json = False) -> None:
    """List the runs of a store, newest first, with progress and origin."""
    with answer(json):
        storage = address.open_store(store or DEFAULT_STORE)
        family = lineage.family(storage, begun.live_since)
        members = sorted((x for x in family.values() if x.state != "gone"), key=lambda x: x.created, reverse=True)
        if json:
            print_json({"runs": [asdict(member) for member in members]})
            return
        if not members:
            typer.echo(f"no runs in {store}")
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        origins = [f"{one.parent}: {one.words}" if one.parent else one.words for one in members]
        table.add_column("run", overflow="fold")
        table.add_column("state", no_wrap=True)
        table.add_column("step", justify="right", no_wrap=True)
        if any(origins):
            table.add_column("origin", overflow="fold")
        table.add_column("started", no_wrap=True)
        for one, origin in zip(members, origins, strict=True):
            started = one.created[:16].replace("T", " ")
            table.add_row(one.name, one.state, _steps(one), *([origin] if any(origins) else []), started)
        print_table(table)


@app.command("tree", hidden=True)
@app.command("graph")
def tree(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help=f"{address.HELP}: its family alone.")] = None,
    store: StoreOption = None,
    json: Json = False,
) -> None:
    """Draw the origin of runs: forks, phases, retrainings and trials."""
    with answer(json):
        chosen = address.resolve(run, store).run if run else None
        storage = chosen.storage if chosen else address.open_store(store or DEFAULT_STORE)
        family = lineage.family(storage, begun.live_since)
        if chosen:
            if chosen.name not in family:
                raise UserError(f"{chosen.uri} does not exist.", remedy="`baton runs list` shows the runs of a store.")
            family = lineage.relatives(family, chosen.name)
        if json:
            print_json({"runs": [asdict(member) for _, member, _ in lineage.walk(family)]})
            return
        _print_tree(family, chosen.name if chosen else None)


@app.command("show")
def show_run(run: StepArgument, store: StoreOption = None, json: Json = False) -> None:
    """Show a run and its checkpoints; with @STEP, a checkpoint's manifest."""
    with answer(json):
        found = address.existing(run, store)
        if found.step is not None:
            _print_manifest(*found.checkpoint(), json)
            return
        result, rows = results.result(found.run, begun.live_since), list(checkpoints(found.run.uri))
        if json:
            print_json({**result, "checkpoints": rows})
            return
        typer.echo(f"{result['run']}: {result['state']}, step {result['steps']}")
        for row in rows:
            typer.echo(f"step {row['step']:>8}  {_listed(row)}")
        if {row.get("parent") for row in rows} - {row["step"] for row in rows} - {None, 0, found.run.began()}:
            typer.echo("earlier ones: removed by retention (chunks.keep)")
        for name in ("model_uri", "report_uri"):
            if uri := result.get(name):
                typer.echo(f"{name.removesuffix('_uri')}: {uri}")


@app.command("remove")
def remove_runs(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN …", help=f"{address.HELP}; several are removed.", show_default=False)
    ],
    store: StoreOption = None,
    is_confirmed: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove runs with all their checkpoints, exports and reports.

    Asks first. Keeps data, which runs share, and forks. Refuses a run that is running, a sweep's trial, and a run whose
    model is in use.
    """
    with answer(json):
        found = list({one.uri: one for one in (address.existing(text, store).run for text in runs)}.values())
        for storage in {one.storage.uri(): one.storage for one in found}.values():
            family = lineage.family(storage, begun.live_since)
            here = [one for one in found if one.storage.uri() == storage.uri()]
            for one in here:
                gone = {other.name for other in here} - {one.name}
                removal.require_removable(one, {name: member for name, member in family.items() if name not in gone})
        sizes = {one.uri: removal.num_bytes(one) for one in found}
        if not is_confirmed:
            for uri, size in sizes.items():
                typer.echo(f"{uri}  {size / 1e6:.1f} MB", err=True)
            typer.confirm("Remove for good?", abort=True, err=True)
        for one in found:
            removal.remove(one)
            begun.forget(one.name, one.uri)
        if json:
            print_json({"removed": [{"run_uri": uri, "bytes": size} for uri, size in sizes.items()]})
        else:
            typer.echo(f"freed {sum(sizes.values()) / 1e6:.1f} MB in {len(found)} run(s)")


@app.command("fork")
def fork(
    run: StepArgument,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option("--run", help="Name of the new run.")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Keep the weights alone, and start at step 0.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option("-o", "--recipe", metavar="FILE.yaml", help="File for its recipe. Default: in the run's folder."),
    ] = None,
    run_now: Annotated[bool, typer.Option("--run-now", help="Run it on this machine now.")] = False,
    store: StoreOption = None,
    json: Json = False,
) -> None:
    """Start a new run at a checkpoint of another, with changed settings.

    Keeps optimizer, schedule, random state and data position: with no change, the fork ends bit-identical to its
    parent. Works without the parent afterwards. Train it with `baton run FILE.yaml --run NAME` or `baton kfp submit`.
    """
    with answer(json):
        found = address.resolve(run, store)
        parent, at = found.run, found.step
        parent.require("recipe.json")
        taken = () if name else set(parent.storage.list("runs"))
        numbered = (f"{parent.name}-fork-{number}" for number in itertools.count(1))
        wanted = name or next(each for each in numbered if each not in taken)
        if recipe and os.path.exists(recipe):
            raise UserError(f"{recipe!r} exists already.", remedy="Give another name by --recipe, or remove it.")
        with _reserved(recipe):
            made = forking.fork(parent, at, wanted, overrides or (), warm=not weights_only)
            path = _write_recipe(made, recipe)
        forked = {
            "run": wanted,
            "run_uri": made.run.uri,
            "parent": parent.uri,
            "step": made.step,
            "digest": made.digest,
            "warm": made.warm,
            "changed": made.run.need(ForkNote).changed,
            "recipe": path if "://" in path else os.path.abspath(path),
        }
        if not json:
            _tell(made, path)
        if not run_now:
            if json:
                print_json(forked)
            return
    local.run(path, run_name=wanted, json=json)


@contextlib.contextmanager
def _reserved(path: str | None) -> Iterator[None]:
    """Creates a file and removes it on an error: no run is made whose recipe cannot be written."""
    if path is None:
        yield
        return
    with open(path, "x", encoding="utf-8"):
        pass
    try:
        yield
    except BaseException:
        os.remove(path)
        raise


def _write_recipe(made: forking.Fork, path: str | None) -> str:
    """Writes a fork's recipe and returns its path or address; one in the run's folder keeps its edits."""
    text = load.to_yaml(made.recipe, as_written=True)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
        return path
    storage, key = made.run.storage, made.run.path("recipe.yaml")
    if not storage.exists(key):
        storage.write(key, text.encode())
    if not storage.is_local:
        return storage.uri(key)
    within = os.path.relpath(storage.key(key))
    return storage.key(key) if within.startswith(os.pardir) else within


def _tell(made: forking.Fork, path: str) -> None:
    carried = "optimizer, schedule, random state and data position kept" if made.warm else "weights alone, from step 0"
    typer.echo(f"run {made.run.name} at {made.run.uri}: fork of step {made.step}, {carried}")
    nothing = ["nothing is changed: it will end on its parent's bits"] if made.warm else []
    for line in made.lines or nothing:
        typer.echo(f"  {line}")
    command = f"{shlex.quote(path)} --run {made.run.name}"
    typer.echo(f"next:   baton run {command}   (on a cluster: baton kfp submit {command})")


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
    done = f"{member.reached}/{member.num_steps}" if member.num_steps else str(member.reached)
    saved = [f"{member.step} saved"] if member.reached > member.step else []
    return ", ".join([done, *saved, *([f"{member.skips} skipped"] if member.skips else [])])


checkpoints_app = typer.Typer(help="List, show, verify and prune checkpoints", no_args_is_help=True)
CheckpointRow = TypeVar("CheckpointRow", results.Listed, results.VerifiedCheckpoint)


@checkpoints_app.command("list")
def list_checkpoints(run_uri: RunArgument, json: Json = False) -> None:
    """List the committed checkpoints of a run."""
    with answer(json):
        _print_rows(json, list(checkpoints(address.resolve(run_uri).run.uri)), _listed)


@checkpoints_app.command("show")
def show_checkpoint(
    run_uri: StepArgument,
    step: Annotated[int | None, typer.Option(help="Step. Default: the newest.")] = None,
    json: Json = False,
) -> None:
    """Print the manifest of a checkpoint."""
    with answer(json):
        found = address.existing(run_uri)
        store = CheckpointStore(found.run)
        _print_manifest(store, chosen_checkpoint(store, found.step if step is None else step), json)


def _print_manifest(store: CheckpointStore, checkpoint: Checkpoint, json: bool) -> None:
    document = {"step": checkpoint.step, "uri": store.uri(checkpoint), **asdict(checkpoint.manifest)}
    print_json(document) if json else typer.echo(dumps(document, indent=2))


@checkpoints_app.command("prune")
@app.command("prune")
def prune_checkpoints(
    run_uri: RunArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List removals without removing.")] = False,
    json: Json = False,
) -> None:
    """Remove the checkpoints that chunks.keep does not keep."""
    with answer(json):
        run = address.existing(run_uri).run
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
@app.command("merge")
def merge_checkpoint(
    run_uri: StepArgument,
    folder: Annotated[str, typer.Option("--output", metavar="FOLDER", help="New folder for the model.")],
    shard_size: Annotated[str, typer.Option(help="Largest file of weights; also the memory needed.")] = "5GB",
    json: Json = False,
) -> None:
    """Merge a sharded checkpoint into safetensors for `from_pretrained`."""
    with answer(json):
        made = merge_model(*address.existing(run_uri).checkpoint(), folder, shard_size)
        if json:
            print_json(made)
        elif made["was_sharded"]:
            typer.echo(f"step {made['step']}: {made['bytes'] / 1e6:.1f} MB of weights in {made['folder']}")
        else:
            typer.echo(f"step {made['step']} is whole already: {made['uri']} is what from_pretrained reads")


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


keys_app = typer.Typer(help="Make and show signing keys", no_args_is_help=True)


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
    """Make a private key, readable by you alone, and its public key FILE.pub."""
    with answer(json):
        signer = Signer.new("p256" if kind is Kind.p256 else "ed25519")
        # The private one first, and neither over another: without its key a run cannot be continued.
        _write(file, signer.pem(), 0o600)
        _write(f"{file}.pub", signer.public.pem, 0o644)
        _tell_key(json, file, signer.public)


@keys_app.command()
def show(file: KeyFile, json: Json = False) -> None:
    """Print the public key of a private or public one."""
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
    run_uri: RunArgument,
    key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Public key by which every checkpoint must be signed.")
    ] = None,
    expect_step: Annotated[int | None, typer.Option(help="With --key: newest step, from your own notes.")] = None,
    expect_digest: Annotated[
        str | None,
        typer.Option(metavar="SHA256", help="With --key: that step's manifest, as printed by this command."),
    ] = None,
    json: Json = False,
) -> None:
    """Read every checkpoint back, and compare all hashes and the chain of parents.

    With --key, also compare every file, field and parent with the signature.
    """
    with answer(json):
        if key is None and (expect_step is not None or expect_digest is not None):
            raise UserError(
                "--expect-step and --expect-digest need --key: a digest without a signature proves nothing."
            )
        if expect_digest is not None and not re.fullmatch("[0-9a-f]{64}", expect_digest):
            raise UserError(f"--expect-digest {expect_digest!r} is not a SHA-256 of 64 hexadecimal digits.")
        run = address.existing(run_uri).run
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


def verify_chain(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Run, or folder of an export.", show_default=False)],
    key: Annotated[str | None, typer.Option(metavar="FILE", help="Public key by which all must be signed.")] = None,
    expect_seal: Annotated[
        str | None, typer.Option(metavar="SHA256", help="Seal that the chain must have, from your own notes.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare all objects of a run, or the files of an export, with the chain of seals.

    Of an export also prints its origin: rows, recipe, base, code, chunks and verdict. It asks no store and no network.
    """
    with answer(json):
        public = read_public(key) if key else None
        if chain.is_export(target):
            told = chain.verify_export(target, public)
            print_json({**told}) if json else _print_origin(told)
            is_well = told["ok"]
        else:
            run = address.existing(target).run
            store = CheckpointStore(run, public)
            found = chain.ChainCheck(run, public).verdict(expect_seal)
            rows = Verification(store, public).verdict() if public else None
            damaged = [] if public else [row for row in results.verify_checkpoints(run) if not row["ok"]]
            is_well = found["ok"] and (rows is None or rows["ok"]) and not damaged
            if json:
                print_json({**found, "ok": is_well, "checkpoints": rows["checkpoints"] if rows else damaged})
            else:
                _print_chain(found, is_signed=public is not None)
                for row in damaged:
                    typer.echo(f"step {row['step']:>8}  {_found(row['problems'])}")
                if rows:
                    _print(rows)
        if not is_well:
            raise typer.Exit(1)


def verify_decisions(
    target: Annotated[
        str, typer.Argument(metavar="FOLDER", help="STORE/sweeps/NAME, or STORE/models/NAME.", show_default=False)
    ],
    key: Annotated[str, typer.Option(metavar="FILE", help="Public key by which all must be signed.")],
    sign: Annotated[
        bool, typer.Option("--sign", help="Sign documents without a signature: your own, of an older Baton.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare the decisions of a sweep, or the accepted models of a recipe, with a key.

    Reads all its trials, or the accepted runs, too. Exit code 1 means a changed, missing or added document.
    """
    with answer(json):
        kind = next((kind for kind in (Sweep, lineage.Models) if f"/{kind.KIND}s/" in target), None)
        if kind is None:
            raise UserError(f"{target!r} is neither STORE/sweeps/NAME nor STORE/models/NAME.")
        told = chain.verify_decisions(kind.open(target), read_public(key), signs=sign)
        if json:
            print_json({**told})
        else:
            typer.echo(f"{len(told['documents'])} documents are as signed")
            for problem in told["problems"]:
                typer.echo(f"CHANGED: {problem}")
            if told["unsigned"]:
                typer.echo(f"note: without signatures, and obeyed by no stage: {', '.join(told['unsigned'])}")
        if not told["ok"]:
            raise typer.Exit(1)


def _print_chain(found: chain.ChainReport, *, is_signed: bool) -> None:
    for row in found["seals"]:
        typer.echo(f"seal {row['number']:>4}  {row['digest'][:12]}  {row['stage']}: {len(row['written'])} written")
    typer.echo(f"{found['objects']} objects are as {'signed' if is_signed else 'sealed'}")
    for problem in found["problems"]:
        typer.echo(f"CHANGED: {problem}")
    for note in (*found["notes"], *([] if is_signed else [NO_MALICE])):
        typer.echo(f"note: {note}")
    if found["head"]:
        typer.echo(f"newest seal: {found['head']}")


NO_MALICE = "without --key damage is found, and malice is not: who can write to the store can write seals"


def _print_origin(told: chain.ExportReport) -> None:
    for name, value in told["origin"].items():
        typer.echo(f"{name}: {value if isinstance(value, str) else dumps(value)}")
    for problem in told["problems"]:
        typer.echo(f"CHANGED: {problem}")
    for note in told["notes"]:
        typer.echo(f"note: {note}")
    state = "as signed" if told["is_signed"] else "consistent"
    typer.echo(f"{told['folder']}: {state if told['ok'] else 'CHANGED'}, run {told['run']}, {len(told['seals'])} seals")


@checkpoints_app.command()
def signature(
    checkpoint: StepArgument,
    file: Annotated[str, typer.Option("--output", metavar="FILE", help="File to write, outside the checkpoint.")],
    json: Json = False,
) -> None:
    """Write a checkpoint's signature as a sigstore bundle."""
    with answer(json):
        store, found = address.existing(checkpoint).checkpoint()
        bundle = found.manifest.meta.get(SIGNATURE)
        if bundle is None:
            raise UserError(f"the checkpoint of step {found.step} is not signed.")
        with open(file, "w", encoding="utf-8") as opened:
            dump(bundle, opened)
        written = {"file": os.path.abspath(file), "step": found.step, "uri": store.uri(found)}
        print_json(written) if json else typer.echo(f"{written['file']} signs the files of {written['uri']}")


def verify_exports(run: RunArgument, store: StoreOption = None, json: Json = False) -> None:
    """Read every export of a run back, and compare all hashes."""
    with answer(json):
        found = address.existing(run, store).run
        if (exported := found.read(ExportedModel)) is None:
            raise UserError(f"run {found.uri!r} has no export.", remedy="It exports once it has ended.")
        rows = results.verify_exports(found, exported)
        if json:
            print_json({"exports": rows})
        for row in rows if not json else []:
            typer.echo(f"{row['format']:<12} {_found(row['problems'])}  {row['uri']}")
        if not all(row["ok"] for row in rows):
            raise typer.Exit(1)


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
        typer.echo("no checkpoints")


def _found(problems: list[str], well: str = "whole") -> str:
    return f"DAMAGED: {'; '.join(problems)}" if problems else well
