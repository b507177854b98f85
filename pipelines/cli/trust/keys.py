"""`baton keys`: a pair of keys to sign checkpoints with."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from typing import Annotated

import typer

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.signing import KEY_FILE, PublicKey, Signer
from baton.pipelines.cli.options import Output, OutputOption, print_json, reported

app = typer.Typer(help="Makes keys that checkpoints are signed with.", no_args_is_help=True)


class Kind(StrEnum):
    """Kind of a key."""

    ed25519 = "ed25519"
    p256 = "p256"


KeyFile = Annotated[str, typer.Argument(metavar="FILE", help="The private key's file; the public one is FILE.pub.")]


@app.command()
def new(
    file: KeyFile,
    kind: Annotated[
        Kind, typer.Option(help="p256 is ECDSA on P-256, the kind that sigstore's model-signing verifies.")
    ] = Kind.ed25519,
    output: OutputOption = Output.text,
) -> None:
    """Makes a private key that only you may read, and its public key beside it."""
    with reported(output):
        signer = Signer.new("p256" if kind is Kind.p256 else "ed25519")
        # The private one first, and neither over another: a key that is lost is a run that nobody continues.
        _write(file, signer.pem(), 0o600)
        _write(f"{file}.pub", signer.public.pem, 0o644)
        _tell(output, file, signer.public)


@app.command()
def show(file: KeyFile, output: OutputOption = Output.text) -> None:
    """Prints the public key that belongs to a private or public one."""
    with reported(output):
        _tell(output, file, read_public(file))


def read_public(file: str) -> PublicKey:
    """Returns the public key in a file with a public or private one.

    Raises:
        UserError: there is no such file, or no such key in it.
    """
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


def _tell(output: Output, file: str, public: PublicKey) -> None:
    if output is Output.json:
        print_json({"file": os.path.abspath(file), "public_key": public.line, "name": public.hint})
        return
    typer.echo(f"public key {public.name}; in the recipe:")
    typer.echo(f"  chunks: {{signing: {{public_key: {public.line}}}}}")
    typer.echo(f"to sign: {KEY_FILE}={shlex.quote(os.path.abspath(file.removesuffix('.pub')))}")
