"""`baton watch` and `baton sweep watch`: a page of a run or a sweep that grows while it trains."""

import secrets
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.address import RunArgument, StoreOption, existing
from baton.errors import UserError
from baton.runs.run import Run, Sweep

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 for any free one.")]


def watch(run: RunArgument, store: StoreOption = None, port: Port = 0, json: options.Json = False) -> None:
    """Serve a page of a run that grows while it trains.

    Shows loss, throughput, chunk, time left and resume proof, from a folder or bucket. Open the printed address; Ctrl-C
    ends the server, not the run.
    """
    with options.answer(json):
        found = existing(run, store)
        if found.step is not None:
            raise UserError(f"{run!r} names a step.", remedy=f"Watch the run: {found.run.name}.")
        serve(found.run, port, json)


def serve(of: Run | Sweep, port: int, json: bool) -> None:
    """Prints the address of a live page, and serves it until Ctrl-C."""
    from baton.watch import server  # half a second of imports

    token, listening = secrets.token_urlsafe(24), server.listen(port)
    address = f"http://{server.HOST}:{listening.getsockname()[1]}/#{token}"
    if json:
        options.print_json({of.KIND: of.name, "address": address})
    else:
        typer.echo(f"{of.KIND} {of.name}: {address}")
        typer.echo("Ctrl-C ends the server.", err=True)
    server.serve(of, listening, token)
