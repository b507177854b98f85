"""Documents of a run: its data, tokens, skips, plan, training, checkpoints and attached script.

Also the survey and preview of rows, the parts of a training state, and the phases of a chunk's time.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, JsonValue

from baton.documents import Document, Json, NamedDocument
from baton.runs.versions import Fingerprint, FormatVersions

PARTS = ("weights", "optimizer", "scheduler", "scaler", "rng", "position", "callbacks", "log", "method")
"""What a checkpoint restores, item by item."""


class StagePhase(StrEnum):
    """What a stage is doing: the clock adds up seconds by it, and events tell when one begins."""

    START = "start"
    LAUNCH = "launch"
    IMPORT = "import"
    FETCH = "fetch"
    BUILD = "build"
    RESTORE = "restore"
    TRAIN = "train"
    SAVE = "save"
    UPLOAD = "upload"
    COMMIT = "commit"
    PRUNE = "prune"
    SCORE = "score"


PHASES_OF_A_CHUNK = (
    StagePhase.START,
    StagePhase.IMPORT,
    StagePhase.FETCH,
    StagePhase.BUILD,
    StagePhase.RESTORE,
    StagePhase.TRAIN,
    StagePhase.SAVE,
    StagePhase.UPLOAD,
)
"""Those into which a chunk's seconds are split, in the order in which it comes to them."""


class SourceLocation(Document):
    file: str
    line: int
    """Line or row number, from 1."""


class Token(Document):
    id: int
    text: str
    """What it stands for; bytes that are no whole character by themselves as `\\xNN`."""
    trained: bool


class TokenSpan(Document):
    """Neighbouring tokens that are treated alike, as one text."""

    text: str
    tokens: int
    trained: bool = False
    cut: bool = False
    """Whether it lies beyond `data.max_length`."""
    left_out: bool = False
    """Whether it stands for tokens that are not among those of the row, to keep that short."""


class PreviewRow(Document):
    """A sequence as the model sees it, or a row that it does not see and why.

    A pair has two, with its answers `chosen` and `rejected`; both begin with the prompt.
    """

    source: SourceLocation
    side: str | None = None
    """`train`, `eval` or `test`; None where all rows must be known to tell."""
    part: str = ""
    """`chosen`, `rejected`, `completion` or `prompt`; empty for rows of one sequence."""
    label: bool | None = None
    """Of a rated row: whether its answer is a good one."""
    columns: dict[str, str] = Field(default_factory=dict)
    """What reward functions get beside the prompt."""
    text: str = ""
    tokens: list[Token] = Field(default_factory=list)
    length: int = 0
    kept: int = 0
    """Tokens that are left by `data.max_length`, from the first on."""
    learned: int = 0
    spans: list[TokenSpan] = Field(default_factory=list)
    rejected: str | None = None


class Preview(Document):
    """The first rows of a recipe as the model sees them."""

    method: str
    max_length: int
    joined: bool = False
    """Whether rows are joined and cut: what does not fit is in the next sequence."""
    note: str = ""
    """What is not as in the run."""
    rows: list[PreviewRow] = Field(default_factory=list)


SKIPS_FOLDER = "skips"
SKIPPED_ROWS_SHOWN = 4
"""Rows that a line names."""


class Skip(NamedDocument, name=SKIPS_FOLDER + "/step-{:08d}.json"):
    """A step that is skipped.

    It is written once, by whoever finds the step first, before the step is trained again: there is nothing to replace.
    """

    step: int
    chunk: int
    reason: str
    """What was looked at: `nan` for a loss or norm that is not finite, else `loss` or `grad_norm`."""
    message: str
    """What it came to, in words."""
    loss: float | None = None
    """None where it was not finite, as the next two."""
    grad_norm: float | None = None
    median: float | None = None
    """Of what was looked at, over the steps before."""
    rows: list[SourceLocation] = Field(default_factory=list)
    """Where its rows come from, the first of them; of packed ones all that are in its sequences."""
    num_rows: int = 0
    """How many there are; 0 where they could not be found."""
    created: str = ""

    @property
    def rows_in_words(self) -> str:
        """Its rows by file and line, the first of them; empty where they could not be found."""
        by_file: dict[str, list[str]] = {}
        for row in self.rows[:SKIPPED_ROWS_SHOWN]:
            by_file.setdefault(row.file, []).append(f"{row.line:,}")
        shown = "; ".join(f"{file} line {', '.join(lines)}" for file, lines in by_file.items())
        rest = self.num_rows - min(len(self.rows), SKIPPED_ROWS_SHOWN)
        return f"{shown} and {rest:,} more" if rest > 0 else shown


ORIGINS = "origins.gz"
"""A run's file of where its rows come from; see `baton.runs.origins`."""


class RunInfo(NamedDocument, name="recipe.json"):
    recipe: Json
    created: str
    name: str = ""
    made: FormatVersions = FormatVersions()
    """What the run was begun with."""

    @property
    def recipe_name(self) -> str:
        return str(self.recipe["name"])

    @property
    def base(self) -> str | None:
        model = self.recipe.get("model")
        base = model.get("base") if isinstance(model, dict) else None
        return base if isinstance(base, str) else None


class SplitData(NamedDocument, name="data.json"):
    """Which data the run has: part of what its checkpoints know each other by."""

    digest: str
    rows: int = 0

    @property
    def prefix(self) -> str:
        """Where the rows lie in the store."""
        return f"data/{self.digest}/split"


class SplitCounts(NamedDocument, name="split.json"):
    rows: int = 0
    train: int | None = None
    eval: int | None = None
    test: int | None = None
    rejected: int = 0
    rejected_uri: str | None = None
    """Address of the rejected rows, None where there are none."""
    source: str = ""
    columns: list[Json] = Field(default_factory=list)
    """The rows' columns, as MLflow's schema has them."""


class TokenizedRows(NamedDocument, name="tokens.json"):
    prefix: str
    """Where they lie in the store."""
    digest: str = ""
    train: int = 0
    tokens: int = 0
    truncated: int = 0
    dropped: int = 0
    refused: int = 0
    """Of those that are dropped: what the chat template does not write, or not so that what counts can be told."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """What the chat template leaves out of the others, such as tool calls, and answers that it does not end."""
    lengths: JsonValue = None
    rendered: str = ""
    """How texts became turns of a conversation, in words; empty where they did not."""
    today: str | None = None
    """Day that the chat template was told, in ISO format; None where it does not ask."""


class TokensMeta(Document):
    tokens: int
    truncated: int
    dropped: int
    refused: int = 0
    left_out: dict[str, int] = Field(default_factory=dict)
    train: int
    eval: int
    test: int = 0
    bytes: int
    """Of the training tokens."""
    lengths: Json
    files: dict[str, list[tuple[str, int]]]
    """Side → its files in order, each with its rows."""
    first: dict[str, list[str]] = Field(default_factory=dict)
    """Side → its first sequences in words, see `baton.data.preview.first_sequences`."""
    first_lines: list[int] = Field(default_factory=list)
    """Of each file to train on, the line of the split that its first row is looked for from: `segments.Origins`.
    Empty where an older Baton wrote some of them."""


class PinnedModels(NamedDocument, name="model.json"):
    """The models that training began with: part of what the run's checkpoints know each other by.

    A method's second model has a key like the base's, `teacher_sha256`.
    """

    base_sha256: str | None
    """Digest of the files of the model that is trained; None for one from scratch."""

    def digest(self, role: str) -> str | None:
        """Returns the digest of a model's files by its role, None where it was not there."""
        value = self.to_json().get(f"{role}_sha256")
        return str(value) if value is not None else None


class OwnCode(NamedDocument, name="code.json"):
    prefix: str


class MissingArtifact(Document):
    """Something that a finished stage had left and that is gone."""

    at: str
    lost: str


class MissingArtifacts(NamedDocument, name="losses.json"):
    """Losses of objects, over the life of a run."""

    losses: list[MissingArtifact] = Field(default_factory=list)


class Fit(Document):
    """What rows are to the methods that learn from the same formats."""

    methods: list[str]
    format: str = ""
    """As `data.format`; empty where the columns fit none that these methods learn from."""
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    """Our column name → the source's, where they differ."""
    usable: int = 0
    """Rows that can be used, of those that were looked at."""
    reason: str = ""
    """Why they fit no format, or why the first unusable one is that."""
    is_chat: bool = False
    """Whether rows come out as messages."""
    turns: int = 0
    """Most messages of a row."""
    answers: int = 0
    """Rows whose prompt has an answer for rewards to look at."""
    numbers: int = 0
    """Those of them whose answer ends in a number."""
    good: int = 0
    characters: list[int] = Field(default_factory=list)
    """Characters of rows: of half, of 99 in 100 and of all at most."""


class Survey(Document):
    columns: list[str]
    looked_at: int
    """Rows that were looked at, the first ones."""
    rows: int | None
    """All of their rows; None where they were not counted."""
    files: dict[str, int] = Field(default_factory=dict)
    """Type of file → how many of it."""
    fits: list[Fit]
    """A fit for each group of methods."""

    def of(self, method: str) -> Fit:
        return next(fit for fit in self.fits if method in fit.methods)


class Script(Document):
    path: str = ""
    """Empty where there is no file, as in a notebook."""
    sha256: str = ""


class AttachedRun(NamedDocument, name="attached.json"):
    """What a script trains: part of what its checkpoints know each other by."""

    name: str
    created: str
    facts: Json
    """What must stay the same, by section: `arguments`, `model`, `rows`, …"""
    chunks: Json = Field(default_factory=dict)
    """Where it is not the default, what the section `chunks` of a recipe says."""
    script: Script = Script()
    made: FormatVersions = FormatVersions()
    """What the run was begun with."""


class LearningRate(NamedDocument, name="lr_find.json"):
    learning_rate: float
    rates: list[float] = Field(default_factory=list)
    losses: list[float] = Field(default_factory=list)


class MicroBatchSize(NamedDocument, name="micro_batch.json"):
    """The rows that fit a forward pass, where that was found out."""

    micro_batch_size: int
    found_by: str = ""
    device: str = ""


class Progress(NamedDocument, name="progress.json"):
    step: int
    chunk: int = 0
    seconds_per_step: float = 0.0
    at: str = ""


class TrackingRun(NamedDocument, name="tracking.json"):
    """The tracking run that metrics go to."""

    mlflow: str
    run_id: str
    experiment_id: str | None = None
    datasets: dict[str, list[str]] = Field(default_factory=dict)
    """Side of the data → name and digest by which the server knows its rows."""


class ChunkAttempt(Document):
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


class ChunkRecord(ChunkAttempt):
    stage: str
    chunk: int = 0
    at: str = ""
    tokens: int = 0


class Restart(Document):
    chunk: int
    reason: str
    """What ended it."""
    at: str = ""
    seconds: float = 0.0


class WarningRecord(Document):
    """Something that went on without what it was to do."""

    text: str
    at: str = ""


class StageRecord(Document):
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
        if self.total_seconds is not None:
            return self.total_seconds
        return sum(self.seconds.values()) if isinstance(self.seconds, dict) else self.seconds


class CheckpointRef(Document):
    step: int
    uri: str = ""
    eval_loss: float | None = None


class Promoted(NamedDocument, name="promoted.json"):
    """Which checkpoint is newest, and which has the lowest evaluation loss."""

    newest: CheckpointRef
    best: CheckpointRef | None = None


class Transfer(Document):
    sent: int = 0
    received: int = 0


class RunCost(Document):
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


class ForkOrigin(Document):
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


class ProofPart(NamedDocument, name="proof/chunk-{:03d}.json"):
    """A checkpoint's part of the resume proof: whose state it continues, what was compared, and on what machine."""

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
    work: RunCost = RunCost()
    forked_from: ForkOrigin | None = None
    chunk: int | None = None
    """The chunk that left it; None before the checkpoint stage has read it back."""
    attempts: list[ChunkAttempt] = Field(default_factory=list)
    verified: bool = False
    verified_at: str | None = None
    verify_seconds: float | None = None
    removed: list[Removed] = Field(default_factory=list)


class ForkNote(NamedDocument, name="fork.json"):
    """Whose child a fork is, and what it changes."""

    parent: str
    step: int
    digest: str = ""
    warm: bool
    changed: dict[str, list[JsonValue]] = Field(default_factory=dict)
    """Dotted path → value before and after."""
