"""Documents of a run: data, tokens, skips, training, checkpoints, attached script; preview and survey of rows."""

import datetime
from enum import StrEnum

from pydantic import Field, JsonValue

from baton.documents import Document, Json, NamedDocument
from baton.recipe.budget import Budget
from baton.runs.versions import Fingerprint, FormatVersions

# Restored state of a checkpoint, item by item.
PARTS = ("weights", "optimizer", "scheduler", "scaler", "rng", "position", "callbacks", "log", "method")


class StagePhase(StrEnum):
    """Phases of a stage: the clock adds up seconds by them, and events tell when one begins."""

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


def moment(at: str) -> float:
    """Returns a document's time in seconds since the epoch."""
    return datetime.datetime.fromisoformat(at).timestamp()


# Until the first step.
STARTING = (
    StagePhase.START,
    StagePhase.LAUNCH,
    StagePhase.IMPORT,
    StagePhase.FETCH,
    StagePhase.BUILD,
    StagePhase.RESTORE,
)
AFTER_TRAINING = ("evaluate", "gate", "export")  # stages


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


class SourceLocation(Document):
    file: str
    line: int  # line or row number, from 1


class Token(Document):
    id: int
    text: str
    """Bytes that are no whole character by themselves as `\\xNN`."""
    trained: bool


class TokenSpan(Document):
    text: str
    tokens: int
    trained: bool = False
    cut: bool = False  # beyond `data.max_length`
    left_out: bool = False  # marks tokens that the row omits, to be short


class PreviewRow(Document):
    """A sequence as the model sees it, or a rejected row; a pair has two sequences, each with the prompt."""

    source: SourceLocation
    side: str | None = None  # `train`, `eval` or `test`; None where only all rows together tell
    part: str = ""  # `chosen`, `rejected`, `completion` or `prompt`; empty for rows of one sequence
    label: bool | None = None  # of a rated row: its answer is good
    columns: dict[str, str] = Field(default_factory=dict)  # columns for reward functions, without the prompt
    text: str = ""
    tokens: list[Token] = Field(default_factory=list)
    length: int = 0
    kept: int = 0  # tokens within `data.max_length`
    learned: int = 0
    spans: list[TokenSpan] = Field(default_factory=list)
    rejected: str | None = None


class Preview(Document):
    method: str
    max_length: int
    joined: bool = False  # rows are joined and cut: the rest of a row is in the next sequence
    note: str = ""  # differences from the run
    rows: list[PreviewRow] = Field(default_factory=list)


SKIPS_FOLDER = "skips"
SKIPPED_ROWS_SHOWN = 4


class Skip(NamedDocument, name=SKIPS_FOLDER + "/step-{:08d}.json"):
    # Written once, by whoever finds the step first, before the step is trained again: there is nothing to replace.
    step: int
    chunk: int
    reason: str  # `nan` for a loss or norm that is not finite, else `loss` or `grad_norm`
    message: str
    loss: float | None = None  # None where it was not finite, as the next two
    grad_norm: float | None = None
    median: float | None = None  # of `reason`'s figure, over the steps before
    # The first rows; of packed ones all that are in its sequences.
    rows: list[SourceLocation] = Field(default_factory=list)
    num_rows: int = 0  # all of its rows; 0 where they could not be found
    created: str = ""

    @property
    def rows_in_words(self) -> str:
        by_file: dict[str, list[str]] = {}
        for row in self.rows[:SKIPPED_ROWS_SHOWN]:
            by_file.setdefault(row.file, []).append(f"{row.line:,}")
        shown = "; ".join(f"{file} line {', '.join(lines)}" for file, lines in by_file.items())
        rest = self.num_rows - min(len(self.rows), SKIPPED_ROWS_SHOWN)
        return f"{shown} and {rest:,} more" if rest > 0 else shown


class RunEnd(NamedDocument, name="ends/end-{:03d}.json"):
    """Decision that a run ends for its budget: stable up to one step, then the schedule's end up to another."""

    # Written once, before the first step that it changes.
    stable_until: int
    last_step: int
    is_decayed: bool  # the rate at `last_step` is that of a run planned for that length
    reason: str
    budget: Budget
    device_seconds: float = 0.0  # spent by then
    chunk: int = 0
    created: str = ""

    @property
    def span(self) -> tuple[int, int]:
        return self.stable_until, self.last_step

    def is_voided(self, budget: Budget | None) -> bool:
        """Tells whether a budget allows more than this end's own; None allows everything."""
        return budget is None or budget.allows_more(self.budget)


ORIGINS = "origins.gz"  # a run's file of where its rows come from; see `baton.runs.origins`


class RunInfo(NamedDocument, name="recipe.json"):
    recipe: Json
    created: str
    name: str = ""
    command: str = ""  # that began it, where it began by a command on this machine
    commit: str = ""  # of the Git repository in that command's folder; `-dirty` after it where files had changed
    until: str = ""  # stage that ends it: `data` or `train`, as in `baton verify`; empty for all stages
    made: FormatVersions = FormatVersions()
    voided: int = 0  # decisions on the run's end before the budget was raised: see `RunEnd`

    @property
    def recipe_name(self) -> str:
        return str(self.recipe["name"])

    @property
    def base(self) -> str | None:
        model = self.recipe.get("model")
        base = model.get("base") if isinstance(model, dict) else None
        return base if isinstance(base, str) else None


class SplitData(NamedDocument, name="data.json"):
    """The run's data; part of `baton.runs.run.state_identity`."""

    digest: str
    rows: int = 0

    @property
    def prefix(self) -> str:
        return f"data/{self.digest}/split"


class SplitCounts(NamedDocument, name="split.json"):
    rows: int = 0
    train: int | None = None
    eval: int | None = None
    test: int | None = None
    rejected: int = 0
    rejected_uri: str | None = None
    source: str = ""
    columns: list[Json] = Field(default_factory=list)  # as MLflow's schema has them


class TokenizedRows(NamedDocument, name="tokens.json"):
    prefix: str
    digest: str = ""
    train: int = 0
    tokens: int = 0
    truncated: int = 0
    dropped: int = 0
    refused: int = 0  # dropped rows that the chat template does not write, or in which it hides the tokens that count
    # Parts that the chat template omits in the others, such as tool calls, and answers that it does not end.
    left_out: dict[str, int] = Field(default_factory=dict)
    lengths: JsonValue = None
    rendered: str = ""  # how texts became turns of a conversation; empty where they did not
    today: str | None = None  # day that the chat template was given, in ISO format; None where it does not ask


class TokensMeta(Document):
    tokens: int
    truncated: int
    dropped: int
    refused: int = 0
    left_out: dict[str, int] = Field(default_factory=dict)
    train: int
    eval: int
    test: int = 0
    bytes: int  # of the training tokens
    lengths: Json
    files: dict[str, list[tuple[str, int]]]  # side → its files in order, each with its number of rows
    first: dict[str, list[str]] = Field(default_factory=dict)
    # Of each training file, the line of the split from which `segments.Origins` looks for its first row. Empty where an
    # older Baton wrote some of the files.
    first_lines: list[int] = Field(default_factory=list)


class PinnedModels(NamedDocument, name="model.json"):
    """Models of the first step; part of `baton.runs.run.state_identity`."""

    # A method's second model has a key like the base's, such as `teacher_sha256`.
    base_sha256: str | None  # digest of the base's files; None for a model from scratch

    def digest(self, role: str) -> str | None:
        value = self.to_json().get(f"{role}_sha256")
        return str(value) if value is not None else None


class OwnCode(NamedDocument, name="code.json"):
    prefix: str


class MissingArtifact(Document):
    at: str
    lost: str


class MissingArtifacts(NamedDocument, name="losses.json"):
    losses: list[MissingArtifact] = Field(default_factory=list)


class Fit(Document):
    """Use of rows for the methods that learn from the same formats."""

    methods: list[str]
    format: str = ""  # as `data.format`; empty where the columns fit none that these methods learn from
    # Our column name → the source's, where they differ.
    columns: dict[str, str | list[str]] = Field(default_factory=dict)
    usable: int = 0  # usable rows among the first `Survey.looked_at`
    reason: str = ""  # why they fit no format, or why the first unusable row does not
    is_chat: bool = False
    turns: int = 0  # most messages of a row
    answers: int = 0  # rows whose prompt has an answer for rewards
    numbers: int = 0  # rows whose answer ends in a number
    good: int = 0
    characters: list[int] = Field(default_factory=list)  # characters of a row: median, 99th percentile and maximum


class Survey(Document):
    columns: list[str]
    looked_at: int  # number of first rows that were read
    rows: int | None  # all rows; None where they were not counted
    files: dict[str, int] = Field(default_factory=dict)
    fits: list[Fit]

    def of(self, method: str) -> Fit:
        return next(fit for fit in self.fits if method in fit.methods)


class Script(Document):
    path: str = ""  # empty where there is no file, as in a notebook
    sha256: str = ""


class AttachedRun(NamedDocument, name="attached.json"):
    name: str
    created: str
    facts: Json  # facts by which its checkpoints know each other, by section: `arguments`, `model`, `rows`, …
    chunks: Json = Field(default_factory=dict)  # as a recipe's section `chunks`, without defaults
    script: Script = Script()
    made: FormatVersions = FormatVersions()


class LearningRate(NamedDocument, name="lr_find.json"):
    learning_rate: float
    rates: list[float] = Field(default_factory=list)
    losses: list[float] = Field(default_factory=list)


class MicroBatchSize(NamedDocument, name="micro_batch.json"):
    micro_batch_size: int
    found_by: str = ""
    device: str = ""


class Progress(NamedDocument, name="progress.json"):
    step: int
    chunk: int = 0
    seconds_per_step: float = 0.0
    at: str = ""
    # Of all chunks so far, with a budget.
    started: float = 0.0
    device_seconds: float = 0.0
    priced_seconds: float = 0.0  # device time, on spot nodes by their share of the price on demand
    start_seconds: float = 0.0  # of the newest process, until its first step
    process_seconds: float = 0.0  # of that process in all
    price: float = 1.0  # see `ChunkAttempt`


class NodeChoice(NamedDocument, name="nodes.json"):
    """Labels of the nodes that a train-chunk was given, with `resources.capacity: spot-first`."""

    chunk: int
    nodes: dict[str, str]


class TrackingRun(NamedDocument, name="tracking.json"):
    mlflow: str
    run_id: str
    experiment_id: str | None = None
    # Side of the data → name and digest that the server has of its rows.
    datasets: dict[str, list[str]] = Field(default_factory=dict)


class ChunkAttempt(Document):
    # `done`, `already_done`, `finished` where early stopping ended the run, `partial` where it was preempted, or
    # `killed` where it left no record: the next attempt wrote this one, up to the step that was noted last.
    outcome: str = ""
    from_step: int = 0
    to_step: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    total_seconds: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    lost_steps: int = 0  # that this attempt trained again; of a killed one, that no checkpoint held
    lost_seconds: float = 0.0
    save_stalls: list[float] = Field(default_factory=list)
    peak_bytes: int | None = None
    price: float = 1.0  # of a device on this node, as a share of the price on demand; with a budget

    @property
    def steps(self) -> int:
        return max(self.to_step - self.from_step, 0)

    @property
    def total(self) -> float:
        return sum(self.seconds.values()) if self.total_seconds is None else self.total_seconds

    @property
    def starting(self) -> float:
        """Seconds until its first step."""
        return sum(self.seconds.get(phase, 0.0) for phase in STARTING)

    @property
    def training(self) -> float:
        return self.seconds.get(StagePhase.TRAIN, 0.0)

    @property
    def saving(self) -> float:
        """Seconds of all that is neither start nor training."""
        return max(self.total - self.starting - self.training, 0.0)

    @property
    def is_cut(self) -> bool:
        """Whether a preemption or a kill has ended it."""
        return self.outcome in ("killed", "partial")


class ChunkRecord(ChunkAttempt):
    stage: str
    chunk: int = 0
    at: str = ""
    tokens: int = 0

    @property
    def ended(self) -> float:
        """When it was recorded, in seconds since the epoch."""
        return moment(self.at)


class Restart(Document):
    chunk: int
    reason: str
    at: str = ""
    seconds: float = 0.0


class PodLoss(NamedDocument, name="lost-pods/{}.json"):
    """A pod of Kubeflow that was lost, and the start of the run after it: the run itself ended with the pod."""

    stage: str  # as on Kubeflow's page
    reason: str
    at: str
    number: int  # of all such starts of this run
    of: int = 0  # starts that the healer allows
    kubeflow_run: str = ""


class WarningRecord(Document):
    text: str
    at: str = ""


class StageRecord(Document):
    stage: str
    at: str = ""
    chunk: int | None = None
    seconds: float | dict[str, float] = 0.0  # in all; of a chunk, by phase
    total_seconds: float | None = None

    @property
    def kind(self) -> str:
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
    newest: CheckpointRef
    best: CheckpointRef | None = None  # lowest evaluation loss


class Transfer(Document):
    sent: int = 0
    received: int = 0


class RunCost(Document):
    # Of all chunks so far.
    started: float = 0.0  # begin of the run's first chunk, in seconds since the epoch
    trained_seconds: float = 0.0
    goodput: float = 0.0  # share of the time since `started` that was spent on training
    lost_steps: int = 0  # steps trained that no checkpoint held
    lost_seconds: float = 0.0
    restarts: int = 0  # lost processes of chunks that a fresh one in their pod replaced
    device_seconds: float = 0.0  # from each start of a chunk to its end, times devices; with a budget
    priced_seconds: float = 0.0  # see `Progress`


class ForkOrigin(Document):
    run_uri: str
    step: int
    digest: str
    # Dotted path → value before and after, of settings that change the restored state.
    changed: dict[str, list[JsonValue]] = Field(default_factory=dict)


class Removed(Document):
    step: int
    reason: str
    bytes: int


class OwnState(Document):
    """State of the user's code in a checkpoint."""

    carried: dict[str, str] = Field(default_factory=dict)  # place, such as `reward.py:seen` → digest of its value
    lost: dict[str, str] = Field(default_factory=dict)  # place that has changed and is not carried → reason


class ProofPart(NamedDocument, name="proof/chunk-{:03d}.json"):
    """A checkpoint's part of the resume proof: its parent, the comparison after the restore, and the machine."""

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
    chunk: int | None = None  # None before the checkpoint stage has read the checkpoint back
    attempts: list[ChunkAttempt] = Field(default_factory=list)
    verified: bool = False
    verified_at: str | None = None
    verify_seconds: float | None = None
    removed: list[Removed] = Field(default_factory=list)


class ForkNote(NamedDocument, name="fork.json"):
    parent: str
    step: int
    digest: str = ""
    warm: bool
    changed: dict[str, list[JsonValue]] = Field(default_factory=dict)  # dotted path → value before and after
