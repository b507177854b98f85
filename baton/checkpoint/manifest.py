"""A checkpoint's manifest besides its files, and the log in `trainer_state.json`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import Field

from baton.documents import Document, load_object
from baton.errors import DamagedError
from baton.runs.documents import ForkOrigin, OwnState, RunCost, Transfer
from baton.runs.versions import Fingerprint, FormatVersions

# --- What a trainer has logged up to a checkpoint, as `trainer_state.json` has it.


LOG_FILE = "trainer_state.json"
"""File of a checkpoint."""
LogEntry = dict[str, float]
"""What a trainer logged at a step: names, `step` among them, and numbers."""


def parse_log(data: bytes, where: str) -> list[LogEntry]:
    """Returns what was logged.

    Args:
        data: The file.
        where: Its address, for messages.

    Raises:
        DamagedError: it is not what a trainer writes.
    """
    history = load_object(data, where).get("log_history")
    if not isinstance(history, list) or not all(map(_is_entry, history)):
        raise DamagedError(f"{where} has no log_history of steps with numbers.")
    return history


def evaluation_losses(history: Iterable[LogEntry]) -> dict[int, float]:
    """Returns the evaluation losses that are numbers, by step."""
    losses = {int(entry["step"]): entry["eval_loss"] for entry in history if "eval_loss" in entry}
    return {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("step"), int)


# --- What a checkpoint's manifest says besides its files.


class Parent(Document):
    """The checkpoint that was newest when this one was made."""

    step: int
    digest: str
    manifest: str = ""
    """SHA-256 of its manifest, where that is signed; see `signatures.manifest_digest`."""


class Sources(Document):
    """SHA-256 of what the state was made of, in a checkpoint that is signed."""

    recipe: str = ""
    plan: str = ""
    data: str = ""
    """Of the document with the digest of the rows."""
    tokens: str = ""
    """Of what the run and the manifest of the tokenized rows say of them, the SHA-256 of their files among it."""
    models: str = ""
    code: str = ""


class Restoration(Document):
    """The checkpoint that the process which made this one had resumed from."""

    step: int = 0
    """Its step; 0 at the start of a run."""
    checked: dict[str, str] | None = None
    """Part of the state → `match`, `mismatch`, `absent`, `left out` or `of other processes`."""
    level: str = "bitwise"
    """`bitwise`, or `consistent` where the machine differed or state of the user's code was not restored."""
    skipped: list[str] = Field(default_factory=list)
    """Why newer checkpoints were passed over."""


class CheckpointMeta(Document):
    """Whose state a checkpoint holds, made by what, where and at what cost."""

    run: str = ""
    step: int = 0
    digest: str
    """Digest of the whole state in memory when it was captured."""
    state: dict[str, str] = Field(default_factory=dict)
    """Part of the state → its digest, and `state` → all of them."""
    parent: Parent | None = None
    """None for the first checkpoint of a run."""
    chain: str = ""
    """Digest over the digests of this checkpoint and all before it."""
    restored: Restoration = Restoration()
    identity: str = ""
    """Digest of recipe, data, model, code and plan, see `run.state_identity`."""
    finished: bool = False
    """Whether early stopping ended the run here."""
    fingerprint: Fingerprint = Fingerprint()
    trainable_parameters: int = 0
    chunk: int = 0
    created: str = ""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phase → seconds of the process that made it."""
    moved: Transfer = Transfer()
    work: RunCost = RunCost()
    forked_from: ForkOrigin | None = None
    skips: list[int] = Field(default_factory=list)
    """Steps up to this one that were skipped, those of its parent's run too; see `training.guard`."""
    hooks: OwnState | None = None
    """State of the user's code; None where a Baton wrote the checkpoint that did not look for any."""
    sources: Sources | None = None
    """What it was made of, where it is signed."""
    made: FormatVersions = FormatVersions()
    """What it was written with."""
