"""Documents that evaluation, gate, export and report write to a run."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from baton.components.shared.core.document import Document, Json, NamedDocument

Figures = dict[str, int | float | None]
"""Name of a figure → its value, None where it was not measured."""


class GateLine(Document):
    """One line of the gate, judged."""

    figure: str = ""
    line: str = ""
    value: int | float | None = None
    limit: int | float | None = None
    """None against a production model that is not there yet."""
    held: bool
    words: str


class Verdict(Document):
    """The gate's verdict on a model."""

    passed: bool
    lines: list[GateLine] = Field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The lines that did not hold, in words."""
        return [line.words for line in self.lines if not line.held]

    @property
    def words(self) -> str:
        """The verdict, for people."""
        return "accepted" if self.passed else f"rejected: {'; '.join(self.failed)}"


class ExamplesFile(Document):
    """Address of all examples."""

    count: int = 0
    path: str = ""


class Evaluation(NamedDocument):
    """The figures of the model before and after training, and of the one in use."""

    NAME: ClassVar[str] = "evaluation.json"

    before: Figures = Field(default_factory=dict)
    after: Figures = Field(default_factory=dict)
    production: Figures | None = None
    production_model: str | None = None
    side: str | None = None
    batch_size: int | None = None
    """Rows per forward pass; figures differ by rounding between sizes."""
    intervals: dict[str, dict[str, list[int | float | None]]] | None = None
    not_measured: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Model → figure → why it has no number."""
    better: dict[str, str | None] = Field(default_factory=dict)
    """Figure → `higher` or `lower`, whichever the better model has. None: not known."""
    signatures: dict[str, str] = Field(default_factory=dict)
    without_reference: int = 0
    samples: list[Json] = Field(default_factory=list)
    examples: ExamplesFile | None = None
    summary: str = ""
    parameters: int = 0
    gate: Verdict | None = None

    def figures(self, when: str) -> Figures | None:
        """Returns the figures of a model, `before`, `after` or `production`; None where there is no such model."""
        return {"before": self.before, "after": self.after, "production": self.production}[when]


class Likeness(Document):
    """How near an exported model's answers are to those of the model as it was trained."""

    tokens: int
    """Tokens shared before the first that differs."""
    max_abs_difference: float


class LlamaCpp(Document):
    """What llama.cpp made of a GGUF file."""

    version: str
    tokens: int


class Finding(Document):
    """What was found when an export was loaded back; the figures where it was asked for tokens and logits."""

    library: str = ""
    words: str = ""
    tokens: int = 0
    """Tokens compared."""
    bitwise: bool = False
    max_abs_difference: float = 0.0
    from_trained: Likeness | None = None
    llama_cpp: LlamaCpp | None = None
    files: dict[str, Finding] = Field(default_factory=dict)
    """Of a format with several files, the finding in each."""


class ModelMeta(Document):
    """What the manifest of a model's files says of them."""

    digest: str = ""
    """State digest of the checkpoint."""
    run: str = ""
    format: str = ""
    step: int = 0
    settings: str | None = None
    """Digest of what decides the bytes."""
    checked: Finding | None = None


class ExportEntry(Document):
    """One format of the export."""

    format: str
    uri: str
    bytes: int = 0
    checked: Finding | None = None


class Registered(NamedDocument):
    """The export's entry in MLflow's registry."""

    NAME: ClassVar[str] = "registry.json"

    export: str = ""
    """Whose files they are."""
    mlflow: str = ""
    model_id: str | None = None
    name: str | None = None
    version: str | None = None
    alias: str | None = None


class Pushed(NamedDocument):
    """The export's repository and commit on the Hub."""

    NAME: ClassVar[str] = "hub.json"

    repo: str
    revision: str
    export: str
    """Whose files they are."""
    commit: str = ""


class ExportedModel(NamedDocument):
    """Addresses of the exported model."""

    NAME: ClassVar[str] = "export.json"

    model_uri: str
    bytes: int = 0
    files: int = 0
    exports: list[ExportEntry] = Field(default_factory=list)
    registry: Registered | None = None
    hub: Pushed | None = None


class ReportPage(NamedDocument):
    """Address of the report."""

    NAME: ClassVar[str] = "report.json"

    report_uri: str
    seconds: float = 0.0


class Failure(NamedDocument):
    """Why a run has ended before its end; it goes once the stage has got past it, or the run begins again."""

    NAME: ClassVar[str] = "failed.json"

    stage: str
    """Name of the stage, as Kubeflow's page has it."""
    message: str
    remedy: str | None = None
    exit_code: int | None = None
    """What the stage ended with; None where it could not say so itself: its pod was lost, or the run cancelled."""
    is_cancelled: bool = False
    at: str = ""
    attempt: int | None = None
    """The engine's attempt at the stage, from 1; None where it does not count."""


class AcceptedModel(Document):
    """A model that was accepted."""

    run: str
    run_uri: str = ""
    model_uri: str
    digest: str = ""
    """Of its state."""
    data: str = ""
    """Digest of the data it has learnt from."""
    recipe: str = ""
    """Digest of what the recipe made of that."""
    learnt: list[str] = Field(default_factory=list)
    """Digests of all splits that it and those before it have learnt from."""
    summary: str = ""
    registry: Json | None = None
    at: str = ""


class RetrainNote(NamedDocument):
    """The retraining that a run belongs to."""

    NAME: ClassVar[str] = "retrain.json"

    model: str
    number: int = 0
    """The model that it is judged against, 0 for none."""
    verdict: str = ""
    """Digest by which a rejection is remembered."""
    owner: str = ""
    data: str = ""
    recipe: str = ""
    learnt: list[str] = Field(default_factory=list)
