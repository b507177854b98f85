"""The documents of a sweep, and those that make a run its trial."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from baton.components.shared.core.document import Document, Json, NamedDocument

State = Literal["stop", "go"]


class TrialEntry(NamedDocument):
    """A configuration of a sweep."""

    NAME: ClassVar[str] = "trials/{}.json"

    id: str
    run: str
    bracket: int = 1
    """Number of its bracket, 0 for one that was forked."""
    values: dict[str, JsonValue] = Field(default_factory=dict)
    """Dotted path → value."""
    parent: Json | None = None


class RungEntry(Document):
    """A rung as it is planned."""

    rung: int = 0
    bracket: int = 1
    chunk: int
    keep: int


class SweepHead(NamedDocument):
    """A sweep: its recipe, its metric, its rungs and its trials."""

    NAME: ClassVar[str] = "sweep.json"

    name: str
    created: str
    recipe: Json
    metric: str
    mode: str
    rungs: list[RungEntry] = Field(default_factory=list)
    trials: list[TrialEntry] = Field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        """Chunks of each trial's run: each bracket's last rung is after the last one."""
        return max(rung.chunk for rung in self.rungs)


class RungScore(Document):
    """A trial's score on a rung."""

    value: float | None
    step: int = 0
    seconds: float | None = None


class Stopped(Document):
    """A trial that was stopped."""

    id: str
    why: str
    """In words, for people."""
    cause: Literal["asked", "beaten", "not_finite", "failed"] | None = None
    """None where an older Baton wrote it; see `RungVerdict.has_failed`."""
    place: int | None = None
    """Its place among those that have a score, from 1, where it was beaten."""
    of: int | None = None
    """How many have a score."""


class RungVerdict(NamedDocument):
    """A rung's decision: which trials advance, which are stopped."""

    NAME: ClassVar[str] = "rungs/rung-{:03d}.json"

    rung: int
    bracket: int = 1
    chunk: int = 0
    scores: dict[str, RungScore] = Field(default_factory=dict)
    kept: list[str] = Field(default_factory=list)
    """Trials that resume, the best first."""
    stopped: list[Stopped] = Field(default_factory=list)
    at: str = ""

    def has_failed(self, stopped: Stopped) -> bool:
        """Tells whether a trial that was stopped came to no score, and nobody had asked to stop it."""
        if stopped.cause is None:  # an older Baton told it by words and the missing score
            return stopped.id not in self.scores and not stopped.why.startswith("asked to stop: ")
        return stopped.cause == "failed"


class Wish(NamedDocument):
    """A user's request to stop or resume a trial."""

    NAME: ClassVar[str] = "control/{}.json"

    state: State
    why: str = ""
    at: str = ""


class Winner(NamedDocument):
    """The best of the trials that have come to their end."""

    NAME: ClassVar[str] = "winner.json"

    id: str
    run: str = ""
    value: float | None = None
    at: str = ""


class TrialNote(NamedDocument):
    """Marks a run as a trial of a sweep."""

    NAME: ClassVar[str] = "trial.json"

    sweep: str
    id: str
    values: dict[str, JsonValue] = Field(default_factory=dict)
    metric: str = ""
    tracking: str | None = None
    """The sweep's tracking run."""


class Score(NamedDocument):
    """A trial's score after a chunk."""

    NAME: ClassVar[str] = "scores/chunk-{:03d}.json"

    chunk: int
    step: int
    value: float | None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    seconds: float | None = None
    at: str = ""


class Failure(NamedDocument):
    """The chunk of a trial that failed last."""

    NAME: ClassVar[str] = "failure.json"

    chunk: int
    message: str
    at: str = ""


class SweepTracking(NamedDocument):
    """The tracking run of a sweep."""

    NAME: ClassVar[str] = "tracking.json"

    mlflow: str | None = None
    """The recipe's server where left out."""
    run_id: str | None = None
