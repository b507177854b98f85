"""Documents that training and the checkpoint stage write to a run."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, JsonValue

from baton.components.shared.core.document import Document, NamedDocument
from baton.components.shared.core.fingerprint import Fingerprint


class LearningRate(NamedDocument):
    """The learning rate that was looked for."""

    NAME: ClassVar[str] = "lr_find.json"

    learning_rate: float
    rates: list[float] = Field(default_factory=list)
    losses: list[float] = Field(default_factory=list)


class MicroBatch(NamedDocument):
    """The rows that fit a forward pass, where that was found out."""

    NAME: ClassVar[str] = "micro_batch.json"

    micro_batch_size: int
    found_by: str = ""
    device: str = ""


class Progress(NamedDocument):
    """The step that a training process has reached."""

    NAME: ClassVar[str] = "progress.json"

    step: int
    chunk: int = 0
    seconds_per_step: float = 0.0
    at: str = ""


class Tracking(NamedDocument):
    """The tracking run that metrics go to."""

    NAME: ClassVar[str] = "tracking.json"

    mlflow: str
    run_id: str
    experiment_id: str | None = None
    datasets: dict[str, list[str]] = Field(default_factory=dict)
    """Side of the data → name and digest by which the server knows its rows."""


class Attempt(Document):
    """The record of one attempt at a chunk."""

    outcome: str = ""
    """`done`, `already_done`, `finished` where early stopping ended the run, or `partial` where it was preempted."""
    from_step: int = 0
    to_step: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phase → seconds."""
    total_seconds: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    lost_steps: int = 0
    lost_seconds: float = 0.0
    save_stalls: list[float] = Field(default_factory=list)
    peak_bytes: int | None = None


class ChunkRecord(Attempt):
    """The record of an attempt at a chunk."""

    stage: str
    chunk: int = 0
    at: str = ""
    tokens: int = 0
    """Training tokens of the run."""


class Restart(Document):
    """A chunk's process that was lost, and was followed by a fresh one in the same pod."""

    chunk: int
    reason: str
    """What ended it."""
    at: str = ""
    seconds: float = 0.0
    """How long it had run."""


class Warning(Document):
    """Something that went on without what it was to do."""

    text: str
    at: str = ""


class StageRecord(Document):
    """The record of an attempt at any stage."""

    stage: str
    at: str = ""
    chunk: int | None = None
    seconds: float | dict[str, float] = 0.0
    """In all; of a chunk, by phase."""
    total_seconds: float | None = None

    @property
    def kind(self) -> str:
        """The stage without the number of its chunk."""
        return self.stage.rpartition("-")[0] if self.chunk is not None else self.stage

    @property
    def total(self) -> float:
        """Seconds in all."""
        if self.total_seconds is not None:
            return self.total_seconds
        return sum(self.seconds.values()) if isinstance(self.seconds, dict) else self.seconds


class Place(Document):
    """A checkpoint that was read back."""

    step: int
    uri: str = ""
    eval_loss: float | None = None


class Promoted(NamedDocument):
    """Which checkpoint is newest, and which has the lowest evaluation loss."""

    NAME: ClassVar[str] = "promoted.json"

    newest: Place
    best: Place | None = None


class Transfer(Document):
    """Bytes that a process had moved to and from the store."""

    sent: int = 0
    received: int = 0


class Work(Document):
    """Cost of the run so far, all its chunks together."""

    started: float = 0.0
    """When the run's first chunk began, in seconds since the epoch."""
    trained_seconds: float = 0.0
    goodput: float = 0.0
    """Share of the time since then that was spent on training."""
    lost_steps: int = 0
    """Steps trained that no checkpoint held."""
    lost_seconds: float = 0.0
    restarts: int = 0
    """Processes of chunks that were lost, and followed by a fresh one in their pod."""


class Origin(Document):
    """The checkpoint of another run that a warm fork began with."""

    run_uri: str
    step: int
    digest: str
    changed: dict[str, list[JsonValue]] = Field(default_factory=dict)
    """Dotted path → value before and after, of settings that change the state restored."""


class Removed(Document):
    """A checkpoint, or what was left of one, that retention has removed."""

    step: int
    reason: str
    bytes: int


class OwnState(Document):
    """State that the user's code keeps between steps, as a checkpoint has it."""

    carried: dict[str, str] = Field(default_factory=dict)
    """Place, such as `reward.py:seen` → digest of its value."""
    lost: dict[str, str] = Field(default_factory=dict)
    """Place that has changed and is not carried → why."""


class ProofPart(NamedDocument):
    """A checkpoint's part of the resume proof: whose state it continues, what was compared, and on what machine."""

    NAME: ClassVar[str] = "proof/chunk-{:03d}.json"

    step: int
    digest: str
    parent_step: int | None = None
    parent_digest: str | None = None
    chain: str = ""
    level: str = "bitwise"
    checked: dict[str, str] | None = None
    restored_step: int = 0
    skipped: list[str] = Field(default_factory=list)
    hooks: OwnState | None = None
    uri: str = ""
    bytes: int = 0
    fingerprint: Fingerprint = Fingerprint()
    seconds: dict[str, float] = Field(default_factory=dict)
    moved: Transfer = Transfer()
    work: Work = Work()
    forked_from: Origin | None = None
    chunk: int | None = None
    """The chunk that left it; None before the checkpoint stage has read it back."""
    attempts: list[Attempt] = Field(default_factory=list)
    verified: bool = False
    verified_at: str | None = None
    verify_seconds: float | None = None
    removed: list[Removed] = Field(default_factory=list)


class ForkNote(NamedDocument):
    """Whose child a fork is, and what it changes."""

    NAME: ClassVar[str] = "fork.json"

    parent: str
    """Address of the run."""
    step: int
    digest: str = ""
    warm: bool
    changed: dict[str, list[JsonValue]] = Field(default_factory=dict)
    """Dotted path → value before and after."""
