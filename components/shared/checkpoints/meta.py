"""What a checkpoint's manifest says besides its files."""

from __future__ import annotations

from pydantic import Field

from baton.components.shared.core.document import Document
from baton.components.shared.core.fingerprint import Fingerprint
from baton.components.shared.runs.documents.training import Origin, OwnState, Transfer, Work
from baton.components.shared.runs.formats import Made


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
    """Digest of recipe, data, model, code and plan, see `runs.state_identity`."""
    finished: bool = False
    """Whether early stopping ended the run here."""
    fingerprint: Fingerprint = Fingerprint()
    trainable_parameters: int = 0
    chunk: int = 0
    created: str = ""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phase → seconds of the process that made it."""
    moved: Transfer = Transfer()
    work: Work = Work()
    forked_from: Origin | None = None
    skips: list[int] = Field(default_factory=list)
    """Steps up to this one that were skipped, those of its parent's run too; see `training.guard`."""
    hooks: OwnState | None = None
    """State of the user's code; None where a Baton wrote the checkpoint that did not look for any."""
    sources: Sources | None = None
    """What it was made of, where it is signed."""
    made: Made = Made()
    """What it was written with."""
