"""RUN of the command line: a name, a path or a URI, each perhaps with `@STEP`."""

import difflib
import os
from dataclasses import dataclass
from typing import Annotated

import typer

from baton.api import chosen_checkpoint, existing_run
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.cli.options import DEFAULT_STORE
from baton.errors import UserError
from baton.local import begun, results
from baton.runs.documents import AttachedRun, RunInfo
from baton.runs.outcomes import ExportedModel, RunFailure
from baton.runs.run import Run
from baton.store.clouds import ANY_BUCKET
from baton.store.storage import Storage

HELP = "Name, path or URI of a run"
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=f"{HELP}.", show_default=False)]
StepArgument = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help=f"{HELP}, and a step. Default: the newest.", show_default=False)
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", help=f"Folder or bucket ({ANY_BUCKET}) to look up names in.", show_default=False),
]


@dataclass(frozen=True)
class Address:
    """A run, perhaps at a step."""

    run: Run
    step: int | None = None

    def checkpoint(self) -> tuple[CheckpointStore, Checkpoint]:
        """Returns the checkpoint of the step, the newest whole one without a step."""
        store = CheckpointStore(self.run)
        if self.step is not None:
            return store, chosen_checkpoint(store, self.step)
        if newest := next(store.whole(), None):
            return store, newest
        remedy = f"`baton runs show {self.run.name}` lists its checkpoints."
        raise UserError(f"run {self.run.uri!r} has no whole checkpoint.", remedy=remedy)


def open_store(uri: str) -> Storage:
    """Opens a store that must exist."""
    storage = Storage(uri)
    if storage.is_local and not os.path.isdir(storage.root):
        raise UserError(f"store {uri!r} does not exist.", remedy="Name it by --store, or start a run first.")
    return storage


def split(address: str) -> tuple[str, int | None]:
    """Splits `RUN@STEP`."""
    run, separator, step = address.rpartition("@")
    if not separator or "/" in step:  # an at sign of a bucket's address
        return address, None
    if not (run and step.isdigit()):
        raise UserError(f"{address!r} is not RUN or RUN@STEP, such as quickstart-1@40.")
    return run, int(step)


def resolve(address: str, store: str | None = None) -> Address:
    """Returns a run by its name, path or URI, perhaps with `@STEP`; it need not exist where a path or URI is given."""
    text, step = split(address)
    if "/" in text:
        return Address(Run.open(text), step)
    if store is not None:
        return Address(Run(Storage(store), text), step)
    newest = begun.find(text)
    if run := in_default_store(text):
        if newest and newest.run_uri and newest.run_uri != Run(Storage(DEFAULT_STORE), text).uri:
            typer.echo(f"note: run {text!r} of {DEFAULT_STORE}; another is at {newest.run_uri}", err=True)
        return Address(run, step)
    if newest and newest.run_uri:
        return Address(_current(newest), step)
    raise _unknown(text)


def in_default_store(name: str) -> Run | None:
    """Returns a run of the store that recipes have by default, in the working folder; None where it has none."""
    run = Run(Storage(DEFAULT_STORE), name)
    if known := begun.find(name, run.uri):
        run = _current(known)
    return run if exists(run) else None


def _current(known: begun.BegunRun) -> Run:
    """Returns a run; of one with phases the newest phase that has begun."""
    runs = [Run.open(uri) for uri in known.phases or [known.run_uri]]
    return next((run for run in reversed(runs) if exists(run)), runs[0])


def existing(address: str, store: str | None = None) -> Address:
    """Returns a run that was begun, by its name, path or URI, perhaps with `@STEP`."""
    found = resolve(address, store)
    existing_run(found.run.uri)
    return found


def exists(run: Run) -> bool:
    """Tells whether a run has begun, however far it came."""
    return any(run.raw(kind.NAME) is not None for kind in (RunInfo, AttachedRun, RunFailure))


def model_of(given: str) -> str:
    """Returns the address of a model: a run's export or checkpoint, else the text itself."""
    text, separator, step = given.rpartition("@")
    text, number = (text, int(step)) if separator and step.isdigit() else (given, None)
    if os.path.isfile(os.path.join(given, "config.json")) or not (run := _run_of(text)):
        return given
    if number is not None:
        store, checkpoint = Address(run, number).checkpoint()
        return store.uri(checkpoint)
    if exported := run.read(ExportedModel):
        return results.uri_here(run, exported.model_uri)
    newest = CheckpointStore(run).newest()
    remedy = f"Name a checkpoint: {given}@{newest.step}." if newest else "It has no checkpoint yet."
    raise UserError(f"run {run.name!r} has exported no model.", remedy=remedy)


def _run_of(text: str) -> Run | None:
    """Returns the run of a name or an address, None for another model."""
    try:
        run = resolve(text).run
        return run if exists(run) else None
    except UserError:
        return None


def _unknown(name: str) -> UserError:
    there = set(begun.names())
    if os.path.isdir(DEFAULT_STORE):
        there.update(Storage(DEFAULT_STORE).list("runs"))
    close = difflib.get_close_matches(name, sorted(there), n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return UserError(
        f"no run {name!r} was begun here, and {DEFAULT_STORE!r} holds none.",
        remedy=f"{hint}Give STORE/runs/{name}, or name the store by --store.",
    )
