"""`baton checkpoints` and `baton keys`: list, show, prune, merge, verify, and sign a run's checkpoints."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from json import dump, dumps
from typing import Annotated, TypeVar

import typer

from baton.api import checkpoints, chunks_of, existing_run
from baton.api import chosen_checkpoint as of_step
from baton.checkpoint import retention
from baton.checkpoint import store as merging
from baton.checkpoint.proof import SignatureReport, Verification
from baton.checkpoint.signatures import SIGNATURE
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.cli.options import Json, RunUri, answer, print_json
from baton.errors import UserError
from baton.local import results
from baton.signing import KEY_FILE, PublicKey, Signer

app = typer.Typer(help="Shows the checkpoints of a run, and checks every byte.", no_args_is_help=True)
CheckpointRow = TypeVar("CheckpointRow", results.Listed, results.VerifiedCheckpoint)
Chosen = Annotated[
    str, typer.Argument(metavar="RUN_URI[@STEP]", help="STORE/runs/NAME, and a step; the newest when left out.")
]


@app.command("list")
def list_checkpoints(run_uri: RunUri, json: Json = False) -> None:
    """Lists the committed checkpoints of a run."""
    with answer(json):
        _print_rows(json, list(checkpoints(run_uri)), _listed)


@app.command("show")
def show_checkpoint(
    run_uri: RunUri,
    step: Annotated[int | None, typer.Option(help="Step; the newest when left out.")] = None,
    json: Json = False,
) -> None:
    """Shows all that a checkpoint's manifest says."""
    with answer(json):
        store = CheckpointStore(existing_run(run_uri))
        checkpoint = of_step(store, step)
        document = {"step": checkpoint.step, "uri": store.uri(checkpoint), **asdict(checkpoint.manifest)}
        print_json(document) if json else typer.echo(dumps(document, indent=2))


@app.command("prune")
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


@app.command("merge")
def merge_checkpoint(
    run_uri: Chosen,
    folder: Annotated[str, typer.Option("--output", metavar="FOLDER", help="Where to write the model; a new folder.")],
    shard_size: Annotated[str, typer.Option(help="Largest file of weights, which is what memory holds.")] = "5GB",
    json: Json = False,
) -> None:
    """Writes the model of a checkpoint in shards as safetensors that `from_pretrained` reads, every byte checked."""
    with answer(json):
        made = merging.merge_model(*chosen(run_uri), folder, shard_size)
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
        _tell(json, file, signer.public)


@keys_app.command()
def show(file: KeyFile, json: Json = False) -> None:
    """Prints the public key that belongs to a private or public one."""
    with answer(json):
        _tell(json, file, read_public(file))


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


def _tell(json: bool, file: str, public: PublicKey) -> None:
    if json:
        print_json({"file": os.path.abspath(file), "public_key": public.line, "name": public.hint})
        return
    typer.echo(f"public key {public.name}; in the recipe:")
    typer.echo(f"  chunks: {{signing: {{public_key: {public.line}}}}}")
    typer.echo(f"to sign: {KEY_FILE}={shlex.quote(os.path.abspath(file.removesuffix('.pub')))}")


@app.command()
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


@app.command()
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
