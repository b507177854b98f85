"""`baton checkpoints verify` and `signature`: what was signed, held against what is in the store."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from baton.components.shared.checkpoints.signatures import SIGNATURE
from baton.components.shared.checkpoints.store import CheckpointStore
from baton.components.shared.checkpoints.verifying import Row, Verdict, Verification
from baton.components.shared.core.errors import UserError
from baton.pipelines.api.checkpoints import existing
from baton.pipelines.cli.checkpoints import Chosen, answer, chosen
from baton.pipelines.cli.options import Output, OutputOption, RunUri, as_json, print_json, reported
from baton.pipelines.cli.trust.keys import read_public
from baton.pipelines.local import results


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
    output: OutputOption = Output.text,
) -> None:
    """Reads every checkpoint back, compares all hashes, and checks that they continue each other.

    With --key each must be what that key has signed, file by file and field by field, with the parent that it was
    signed with.
    """
    with reported(output):
        if key is None and (expect_step is not None or expect_digest is not None):
            raise UserError("--expect-step and --expect-digest need --key: without a signature a digest says nothing.")
        run = existing(run_uri)
        if key is None:
            rows = results.verify_checkpoints(run)
            answer(output, rows, lambda row: _found(row["problems"]))
            is_well = all(row["ok"] for row in rows)
        else:
            store = CheckpointStore(run)
            verdict = Verification(store, read_public(key)).verdict(expect_step, _digest(expect_digest))
            print_json({**verdict}) if output is Output.json else _print(verdict)
            is_well = verdict["ok"]
        if not is_well:
            raise typer.Exit(1)


def signature(
    checkpoint: Chosen,
    file: Annotated[str, typer.Option("--output", metavar="FILE", help="Where to write it; outside the checkpoint.")],
) -> None:
    """Writes a checkpoint's signature as a sigstore bundle, for `model_signing verify key` and other tools."""
    with reported():
        store, found = chosen(checkpoint)
        bundle = found.manifest.meta.get(SIGNATURE)
        if bundle is None:
            raise UserError(f"the checkpoint of step {found.step} is not signed.")
        with open(file, "w", encoding="utf-8") as opened:
            json.dump(bundle, opened)
        written = {"file": os.path.abspath(file), "step": found.step, "uri": store.uri(found)}
        print_json(written) if as_json() else typer.echo(f"{written['file']} signs the files of {written['uri']}")


def _print(verdict: Verdict) -> None:
    for row in verdict["checkpoints"]:
        typer.echo(f"step {row['step']:>8}  {_found(row['problems'], 'signed, whole')}")
    for problem in verdict["problems"]:
        typer.echo(f"the run: {problem}")
    for note in verdict["notes"]:
        typer.echo(f"note: {note}")
    if head := verdict["head"]:
        typer.echo(_head(head))
    if not verdict["checkpoints"]:
        typer.echo("there is no checkpoint")


def _head(head: Row) -> str:
    return f"newest: step {head['step']}, manifest {head.get('manifest')}"


def _found(problems: list[str], well: str = "whole") -> str:
    return f"DAMAGED: {'; '.join(problems)}" if problems else well


def _digest(text: str | None) -> str | None:
    if text is not None and (len(text) != 64 or not set(text) <= set("0123456789abcdef")):
        raise UserError(f"--expect-digest {text!r} is not a SHA-256 of 64 hexadecimal digits.")
    return text
