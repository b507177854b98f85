"""What a stranger need not take on trust: checkpoints looked at and verified, keys, signatures, an audit."""

from __future__ import annotations

import typer

from baton.pipelines.cli import checkpoints
from baton.pipelines.cli.trust import audit, keys, verifying

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Adds these commands to `baton`."""
    checkpoints.app.command()(verifying.verify)
    checkpoints.app.command()(verifying.signature)
    app.add_typer(checkpoints.app, name="checkpoints")
    app.add_typer(keys.app, name="keys")
    app.command()(audit.audit)
