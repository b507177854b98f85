"""Documents of evaluation, gate, export, report and retraining, and of sweeps and their trials."""

from typing import Literal

from pydantic import Field, JsonValue

from baton.documents import Document, Json, NamedDocument

Figures = dict[str, int | float | None]  # figure → value, None where it was not measured


class JudgedLine(Document):
    figure: str = ""
    line: str = ""
    value: int | float | None = None
    limit: int | float | None = None  # None against a production model that is not there yet
    held: bool
    words: str


class GateVerdict(Document):
    passed: bool
    lines: list[JudgedLine] = Field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [line.words for line in self.lines if not line.held]

    @property
    def words(self) -> str:
        return "accepted" if self.passed else f"rejected: {'; '.join(self.failed)}"


class ExamplesFile(Document):
    count: int = 0
    path: str = ""


class EvaluationResult(NamedDocument, name="evaluation.json"):
    before: Figures = Field(default_factory=dict)
    after: Figures = Field(default_factory=dict)
    production: Figures | None = None
    production_model: str | None = None
    side: str | None = None
    batch_size: int | None = None  # rows per forward pass; figures differ by rounding between sizes
    intervals: dict[str, dict[str, list[int | float | None]]] | None = None
    not_measured: dict[str, dict[str, str]] = Field(default_factory=dict)  # model → figure → reason
    # Figure → `higher` or `lower`, as the better model has it; None where that is not known.
    better: dict[str, str | None] = Field(default_factory=dict)
    signatures: dict[str, str] = Field(default_factory=dict)
    without_reference: int = 0
    samples: list[Json] = Field(default_factory=list)
    examples: ExamplesFile | None = None
    summary: str = ""
    parameters: int = 0
    gate: GateVerdict | None = None

    def figures(self, when: str) -> Figures | None:
        return {"before": self.before, "after": self.after, "production": self.production}[when]


class Likeness(Document):
    tokens: int
    max_abs_difference: float


class LlamaCpp(Document):
    version: str
    tokens: int


class ExportCheck(Document):
    """Result of loading an export back; the figures only where it gave tokens and logits."""

    library: str = ""
    words: str = ""
    tokens: int = 0
    bitwise: bool = False
    max_abs_difference: float = 0.0
    from_trained: Likeness | None = None
    llama_cpp: LlamaCpp | None = None
    files: dict[str, "ExportCheck"] = Field(default_factory=dict)  # of a format with several files: file → its check


class ModelMeta(Document):
    """`meta` of the manifest of a model's files."""

    digest: str = ""
    run: str = ""
    format: str = ""
    step: int = 0
    settings: str | None = None  # digest of all settings that decide the bytes
    checked: ExportCheck | None = None


class ExportEntry(Document):
    format: str
    uri: str
    bytes: int = 0
    checked: ExportCheck | None = None


class RegistryEntry(NamedDocument, name="registry.json"):
    export: str = ""
    mlflow: str = ""
    model_id: str | None = None
    name: str | None = None
    version: str | None = None
    alias: str | None = None


class Pushed(NamedDocument, name="hub.json"):
    repo: str
    revision: str
    export: str
    commit: str = ""


class ExportedModel(NamedDocument, name="export.json"):
    model_uri: str
    bytes: int = 0
    files: int = 0
    exports: list[ExportEntry] = Field(default_factory=list)
    registry: RegistryEntry | None = None
    hub: Pushed | None = None


class ReportPage(NamedDocument, name="report.json"):
    report_uri: str
    seconds: float = 0.0


class RunFailure(NamedDocument, name="failed.json"):
    """Failure of a run; removed once the stage has got past it, or the run begins again."""

    stage: str  # as on Kubeflow's page
    message: str
    remedy: str | None = None
    exit_code: int | None = None  # None where the stage had no time to tell: its pod was lost, or the run cancelled
    is_cancelled: bool = False
    at: str = ""
    attempt: int | None = None  # the engine's attempt at the stage, from 1; None where it does not count


class AcceptedModel(Document):
    run: str
    run_uri: str = ""
    model_uri: str
    digest: str = ""  # of the model's state
    data: str = ""  # digest of the data
    recipe: str = ""  # digest of all settings that decide bits
    # Digests of all splits that this model and its predecessors have learnt from.
    learnt: list[str] = Field(default_factory=list)
    summary: str = ""
    registry: Json | None = None
    at: str = ""


class RetrainNote(NamedDocument, name="retrain.json"):
    model: str
    number: int = 0  # number of the model that it is judged against, 0 for none
    verdict: str = ""  # digest under which a rejection is kept
    owner: str = ""
    data: str = ""
    recipe: str = ""
    learnt: list[str] = Field(default_factory=list)


TrialState = Literal["stop", "go"]


class TrialEntry(NamedDocument, name="trials/{}.json"):
    id: str
    run: str
    bracket: int = 1  # 0 for a trial that was forked
    values: dict[str, JsonValue] = Field(default_factory=dict)
    parent: Json | None = None


class RungEntry(Document):
    rung: int = 0
    bracket: int = 1
    chunk: int
    keep: int


class SweepHead(NamedDocument, name="sweep.json"):
    name: str
    created: str
    recipe: Json
    metric: str
    mode: str
    rungs: list[RungEntry] = Field(default_factory=list)
    trials: list[TrialEntry] = Field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        # Each bracket's last rung is after the last chunk.
        return max(rung.chunk for rung in self.rungs)

    def chunks(self, number: int) -> tuple[int, int]:
        """Returns the first and last chunk that trials train for a rung, given by its number."""
        before, rung = self.rungs[number - 2], self.rungs[number - 1]
        return (before.chunk + 1 if number > 1 and before.bracket == rung.bracket else 1), rung.chunk


class RungScore(Document):
    value: float | None
    step: int = 0
    seconds: float | None = None


class StoppedTrial(Document):
    id: str
    why: str
    # None where an older Baton wrote it; see `RungVerdict.has_failed`.
    cause: Literal["asked", "beaten", "not_finite", "failed"] | None = None
    place: int | None = None  # rank among the trials with a score, from 1, where it was beaten
    of: int | None = None


class TrialDifference(Document):
    """How much worse a trial is than the last one that advances by its place, over the same held-out rows."""

    against: str
    value: float
    interval: list[float]  # its ends, the sweep's `sure` being the share of draws inside
    confidence: float  # share of draws in which the trial is worse

    @property
    def in_words(self) -> str:
        low, high = self.interval
        return f"worse than {self.against} by {low:.3g} to {high:.3g} (confidence {self.confidence:.3g})"


class RungVerdict(NamedDocument, name="rungs/rung-{:03d}.json"):
    rung: int
    bracket: int = 1
    chunk: int = 0
    scores: dict[str, RungScore] = Field(default_factory=dict)
    kept: list[str] = Field(default_factory=list)  # best first
    stopped: list[StoppedTrial] = Field(default_factory=list)
    differences: dict[str, TrialDifference] = Field(default_factory=dict)  # of trials beyond the places that advance
    spent: str = ""  # of the sweep's budget, in words
    at: str = ""

    def has_failed(self, stopped: StoppedTrial) -> bool:
        """Tells whether a trial stopped without a score, and without a request."""
        if stopped.cause is None:  # an older Baton wrote words only
            return stopped.id not in self.scores and not stopped.why.startswith("asked to stop: ")
        return stopped.cause == "failed"


class TrialRequest(NamedDocument, name="control/{}.json"):
    state: TrialState
    why: str = ""
    at: str = ""


class TrialJoin(NamedDocument, name="joins/rung-{:03d}-{}.json"):
    device: str  # that trains a trial which has joined within the rung


class Winner(NamedDocument, name="winner.json"):
    # Among the trials that have trained to their end.
    id: str
    run: str = ""
    value: float | None = None
    at: str = ""


class TrialInfo(NamedDocument, name="trial.json"):
    sweep: str
    id: str
    values: dict[str, JsonValue] = Field(default_factory=dict)
    metric: str = ""
    tracking: str | None = None  # id of the sweep's tracking run
    keeps_rows: bool = False  # whether scores come with their held-out rows


class TrialScore(NamedDocument, name="scores/chunk-{:03d}.json"):
    chunk: int
    step: int
    value: float | None
    metrics: dict[str, float | None] = Field(default_factory=dict)
    seconds: float | None = None
    at: str = ""


class TrialRows(NamedDocument, name="rows/chunk-{:03d}.json"):
    """Held-out rows of a score, in their order: each its value, and its weight in the mean."""

    values: list[float]
    weights: list[float]
    data: str = ""  # digest of the split: trials with another seed or source have other rows


class TrialFailure(NamedDocument, name="failure.json"):
    chunk: int
    message: str
    at: str = ""


class SweepTracking(NamedDocument, name="tracking.json"):
    mlflow: str | None = None  # the recipe's server where left out
    run_id: str | None = None
