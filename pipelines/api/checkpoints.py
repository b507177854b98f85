"""The checkpoints of a run: listed, read back, opened, downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from baton.components.shared.checkpoints.logs import LogEntry
from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Chunks
from baton.components.shared.runs.documents.attached import Attached
from baton.components.shared.runs.run import Run
from baton.pipelines.local import results
from baton.pipelines.local.results import Listed, Verified


class Checkpoints(Sequence[Listed]):
    """The committed checkpoints of a run as they were when it was opened, ascending.

    Each is a mapping with `step`, `uri`, `digest`, `parent`, `chunk`, `bytes`, `created` and more; one whose manifest
    is damaged has a `problem`.

    Attributes:
        run_uri: Address of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run_uri = run.uri
        self._store = CheckpointStore(run)
        self._rows = results.list_checkpoints(run)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Listed]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Listed: ...
    @overload
    def __getitem__(self, index: slice) -> list[Listed]: ...
    def __getitem__(self, index: int | slice) -> Listed | list[Listed]:
        return self._rows[index]

    def __repr__(self) -> str:
        return f"<checkpoints of {self.run_uri}: {', '.join(str(row['step']) for row in self._rows) or 'none'}>"

    def open(self, step: int | None = None) -> Checkpoint:
        """Returns a checkpoint with its manifest.

        Args:
            step: Its step; that of the newest one when left out.

        Raises:
            UserError: there is none.
        """
        return chosen(self._store, step)

    def verify(self) -> list[Verified]:
        """Reads every checkpoint back, byte for byte, and checks that they continue each other.

        Returns:
            A row for each, with `step`, `ok` and `problems`.
        """
        return results.verify_checkpoints(self._store.run)

    def history(self, step: int | None = None) -> list[LogEntry]:
        """Returns what the trainer had logged up to a checkpoint, an entry for each time it did.

        Args:
            step: Its step; that of the newest one when left out.
        """
        return self._store.history(self.open(step))

    def fetch(self, folder: str, step: int | None = None) -> str:
        """Downloads a checkpoint, every byte checked, and returns its folder.

        `from_pretrained` reads it, and `Trainer.train(resume_from_checkpoint=…)`.

        Args:
            folder: A local folder that does not exist yet; in a store that is a folder it is left out, and its own
                returned.
            step: Its step; that of the newest one when left out.

        Raises:
            MarkedError: it is not what was committed.
        """
        return self._store.fetch(self.open(step), folder)


def checkpoints(run_uri: str) -> Checkpoints:
    """Returns the checkpoints of a run, of a recipe or of a script.

    Args:
        run_uri: Address of the run, `STORE/runs/NAME`.

    Raises:
        UserError: there is no such run.
    """
    return Checkpoints(existing(run_uri))


def existing(run_uri: str) -> Run:
    """Returns a run that was begun.

    Raises:
        UserError: it was not.
    """
    run = Run.open(run_uri)
    if run.get(Attached.NAME) is None:
        run.require("recipe.json")
    return run


def chunks_of(run: Run) -> Chunks:
    """Returns how a run is cut and what it keeps, as its recipe or its script says."""
    attached = run.read(Attached)
    return Chunks.model_validate(attached.chunks) if attached else run.recipe().chunks


def chosen(store: CheckpointStore, step: int | None) -> Checkpoint:
    """Returns the checkpoint of a step, the newest without one.

    Raises:
        UserError: there is none.
    """
    # An upload that was never committed is passed over; the newest one's damage is told.
    wanted = reversed(store.steps()) if step is None else [step]
    for each in wanted:
        if checkpoint := store.read(each):
            return checkpoint
    which = "" if step is None else f" of step {step}"
    there = f"; it has {steps}" if (steps := store.committed_steps()) else ""
    raise UserError(f"run {store.run.uri!r} has no checkpoint{which}{there}.")
