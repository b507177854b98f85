"""What every stage tells, and the stages before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypedDict

from baton.components.shared.core.events.event import Event


class Stage(Event, kind="stage"):
    """A stage has started, or is done."""

    stage: str
    state: str


class Error(Event, kind="error"):
    """A stage fails. Where it is marked, what it found damaged is made again by a second attempt; where it is lost, a
    fresh process may be spared it; where it skips, a fresh process skips the step that it has found."""

    stage: str
    message: str
    exit_code: int
    marked: bool | None = None
    lost: bool | None = None
    skips: bool | None = None


class Warned(Event, kind="warned"):
    """Something goes on without what it was to do, which a person should know of."""

    text: str


class Source(Event, kind="source"):
    """A source of rows, as it was recognised."""

    uri: str
    format: str
    columns: Mapping[str, str | list[str]]
    unused: list[str] | None = None

    @property
    def in_words(self) -> str:
        """What its rows are, and which columns became what."""
        became = ", ".join(
            ours if ours == theirs else f"{ours} ← {theirs if isinstance(theirs, str) else ' + '.join(theirs)}"
            for ours, theirs in self.columns.items()
        )
        unused = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        told = f" ({became}{unused})" if unused or became not in ("", "text", "messages") else ""
        return f"rows of {self.format}{told}"


class Rejected(Event, kind="rejected"):
    """Rows are unusable; they are kept, with their reasons."""

    count: int
    of: int
    first: str
    uri: str


class Quality(Event, kind="quality"):
    """What was found in the rows."""

    state: str
    sentence: str
    page: str


class Split(Event, kind="split"):
    """Rows by side."""

    format: str
    rows: int
    train: int
    eval: int
    test: int
    rejected: int


class Resumed(Event, kind="resumed"):
    """Parts that were tokenized by an earlier attempt."""

    parts: int
    of: int


class Tokenized(Event, kind="tokenized"):
    """A part is tokenized."""

    part: str
    done: int
    of: int


class Truncation(Event, kind="truncation"):
    """More rows than allowed are longer than a sequence."""

    text: str
    over: int
    rows: int
    longest: int
    fixed: bool


class LeftOut(Event, kind="left_out"):
    """The chat template does not write all that the rows hold."""

    text: str
    counts: dict[str, int]


class NoEffect(Event, kind="no_effect"):
    """A setting, or a part of the rows, changes nothing in this run."""

    text: str


class Tokens(Event, kind="tokens"):
    """Rows are tokenized, now or by another run."""

    reused: bool
    steps: int
    targets: list[int]
    tokens: int
    truncated: int
    dropped: int
    train: int
    eval: int
    test: int | None = None
    bytes: int | None = None
    lengths: dict[str, object] | None = None
    order: str | None = None
    dropped_uri: str | None = None
    rendered: str | None = None
    """How texts became turns of a conversation; not told where they did not."""
    rendered_row: str | None = None
    """One of them; not told where the recipe wants counts alone."""
    refused: int | None = None
    left_out: dict[str, int] | None = None


class LrFound(Event, kind="lr_found"):
    """The learning-rate finder has ended."""

    learning_rate: float


class Verified(Event, kind="verified"):
    """A chunk's last checkpoint was read back from the store."""

    step: int
    bytes: int
    digest: str


class Evaluating(Event, kind="evaluating"):
    """How far an evaluation is with a model."""

    when: str
    doing: str
    done: int
    of: int


class Evaluated(Event, kind="evaluated"):
    """Figures of the model before or after training, None for one that was not measured.

    Each is a field of its own on the wire.
    """

    when: str
    figures: Mapping[str, float | None]

    def fields(self) -> dict[str, object]:
        """Returns what is written."""
        return {"when": self.when, **self.figures}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the event: what is no known field is a figure."""
        return cls(fields["when"], {name: value for name, value in fields.items() if name not in ("when", "at")})


class Judged(Event, kind="judged"):
    """The gate's verdict, with the lines that failed."""

    passed: bool
    failed: list[str]


class SkippedExport(Event, kind="skipped_export"):
    """An export is damaged and made again."""

    uri: str
    reason: str


class HandedOut(Event, kind="handed_out"):
    """A format is exported; `checked` says how it compares with the trained model."""

    format: str
    bytes: int
    checked: str


class Exported(Event, kind="exported"):
    """The model is exported in all its formats."""

    uri: str
    bytes: int


class Report(Event, kind="report"):
    """The report is written."""

    uri: str


class Looked(Event, kind="looked"):
    """Whether a model is trained again, and why."""

    decision: str
    words: str
    run: str


class Queued(Event, kind="queued"):
    """A retraining waits for the one under way."""

    behind: str
    since: str


class GateLine(TypedDict):
    """A condition of the gate, in words, and whether it held."""

    words: str
    held: bool


class Retraining(Event, kind="retraining"):
    """What a retraining came to, as it is also kept in the store.

    Its state: `unchanged`, `busy` (another one is under way: this one is dropped), `promoted`,
    `rejected` by the gate, or `failed`.
    """

    state: str
    words: str
    at: str
    run: str | None = None
    run_uri: str | None = None
    report_uri: str | None = None
    summary: str | None = None
    gate: list[GateLine] | None = None
    model_uri: str | None = None


class Prepares(Event, kind="prepares"):
    """What split and tokenize are given before a bracket: `recipe`, `run` and `source` of each data."""

    preparations: list[dict[str, str]]


class Entered(Event, kind="entered"):
    """The runs of a bracket's trials."""

    runs: list[str]


class Rung(Event, kind="rung"):
    """A rung is judged: the trials that stay, and how many stop."""

    rung: int
    of: int
    chunk: int
    kept: list[str]
    stopped: int


class Verdict(Event, kind="verdict"):
    """The runs that stay after a rung, and the best one's."""

    kept: list[str]
    winner: str
