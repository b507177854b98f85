"""Recipe sections `evaluation` and `export`: judging the result, and its formats."""

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.recipe.base import Fraction, Name, Positive, Section, WrittenAs
from baton.recipe.methods import AGAINST_BASELINE, SPECS
from baton.recipe.run import Hook, shorthand

ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A metric of texts, which the function of its name in `baton/models/metrics.py` computes."""

    package: str | None = None  # module that it needs beyond the base install
    figures: tuple[str, ...] = ()  # names of its figures, the one for summaries last; its own name where empty


METRICS = {
    "exact_match": MetricSpec(),
    "numeric_match": MetricSpec(),
    "bleu": MetricSpec(package="sacrebleu"),
    "chrf": MetricSpec(package="sacrebleu"),
    "rouge": MetricSpec(package="rouge_score", figures=ROUGE),
    "bertscore": MetricSpec(package="bert_score"),
}
FIGURES = {name: spec.figures or (name,) for name, spec in METRICS.items()}
if TYPE_CHECKING:
    Metric = str
else:
    Metric = Literal[*METRICS]

# A line of a gate: `<= 20`, `>= production`, `<= baseline * 0.98`, `>= baseline + 0.02`.
GATE = re.compile(
    r"(?P<sign><=|>=|<|>)\s*(?:(?P<number>[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
    r"|(?P<against>baseline|production)(?:\s*(?P<operator>[-+*])\s*(?P<by>\d+(?:\.\d+)?))?)"
)
# Address of a model in MLflow's registry.
REGISTERED = re.compile(r"models:/(?P<name>[^@/]+)(?:@(?P<alias>[^@/]+)|/(?P<version>\d+))")
LONGEST_LINE = 200  # characters of a line for which a correction is guessed: that takes the square of them


class Tasks(Section):
    """Tasks of the LM evaluation harness."""

    names: Annotated[list[str], Field(min_length=1)]
    """Tasks or groups, such as `gsm8k` or `hellaswag`."""
    include_path: str | None = None
    """Folder of your own tasks in YAML, local or `s3://…`."""
    few_shot: Annotated[int, Field(ge=0)] | None = None
    """Examples before each question; default: the task's own number."""
    limit: Positive | None = None
    """Documents per task; default: all."""
    render_as: Literal["auto", "chat", "text"] = "auto"
    """`chat`: questions and examples as turns of the chat template, after `data.system`. `auto`: chat where training
    used turns. A production model without a template gets text."""


class Evaluation(Section):
    """Evaluation of the result, always in comparison with the start model."""

    samples: Annotated[int, Field(ge=0)] = 8
    """Held-out rows to generate for, before and after training, as input of `metrics`."""
    max_new_tokens: Positive = 64
    """Longest sample in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass to sample from."""
    metrics: list[Metric] = []
    """Comparison of generated text with the row's answer: `exact_match`, `numeric_match` (last number), `bleu` and
    `chrf` (sacreBLEU), `rouge` (1, 2, L), `bertscore`."""
    functions: list[Annotated[Hook, shorthand("use")]] = []
    """Your own functions, from the image or `hooks.source`: of lists `prompts`, `completions`, `references` and their
    options, they return a number for each."""
    bertscore_model: str | None = None
    """Encoder for `bertscore`: hub id or folder."""
    tasks: Tasks | None = None
    """Tasks of the LM evaluation harness; needs the package `lm-eval`."""
    production: str | None = None
    """Production model to compare with: folder, `s3://…`, hub id, `models:/name@alias` in MLflow's registry, or
    `accepted` from the last retraining. A missing alias or `accepted` counts as none."""
    confidence: Fraction = 0.95
    """Level of intervals, by bootstrap over rows."""
    gate: dict[str, str] = {}
    """Conditions by metric: `{perplexity: "<= baseline * 0.98", numeric_match: ">= production"}`. A run that fails them
    is rejected and exports nothing. Without a production model, conditions on it hold."""
    every: Positive | None = None
    """Steps between evaluations during training; default: none."""
    per_epoch: Positive | None = None
    """Evaluations per epoch, evenly spaced, the last at its end; instead of `every`."""
    write_every: Annotated[Positive | None, WrittenAs("sample_every")] = None
    """Steps between generations for the samples during training; default: none. Texts go to the run's `samples/`,
    results of `metrics` and `functions` to the metrics, as `written_…`. Training is unaffected."""
    batch_size: Positive | None = None
    """Rows per forward pass; default: `training.micro_batch_size`."""

    @field_validator("gate")
    @classmethod
    def _lines(cls, value: dict[str, str]) -> dict[str, str]:
        for name, line in value.items():
            if not GATE.fullmatch(line.strip()):
                meant = _near_line(line) if len(line) <= LONGEST_LINE else None
                example = f"; did you mean {meant!r}?" if meant else ", for example '<= baseline * 0.98'"
                raise ValueError(
                    f"{name}: {line[:LONGEST_LINE]!r} is not a gate condition; expected <=, >=, < or > and a number, "
                    f"baseline or production{example}"
                )
        return value

    @property
    def in_training(self) -> bool:
        """Whether held-out rows are evaluated during training."""
        return bool(self.every or self.per_epoch)

    def figures(self, method: str) -> list[str]:
        """Returns the names of a run's figures, without those of `tasks` and of single reward functions."""
        texts = [figure for name in self.metrics for figure in FIGURES[name]]
        return [*SPECS[method].figures, *texts, *(function.use.rpartition(":")[2] for function in self.functions)]

    def check_gate(self, method: str) -> None:
        """Makes sure that each line of the gate is on an existing figure."""
        known = self.figures(method)
        for name, line in self.gate.items():
            of_task = self.tasks and "." in name
            of_reward = SPECS[method].is_judged_by_rewards and name.startswith("reward_")
            if name not in known and not of_task and not of_reward:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there will be {', '.join(known)}"
                raise ValueError(f"evaluation.gate: no figure is called {name!r}; {hint}")
            if name in AGAINST_BASELINE and "baseline" in line:
                raise ValueError(f"evaluation.gate: {name} compares with the baseline itself; expected a number")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.every and self.per_epoch:
            raise ValueError("every and per_epoch both set the steps of evaluations; remove one")
        if "bertscore" in self.metrics and not self.bertscore_model:
            raise ValueError("metrics: bertscore needs an encoder; name one in evaluation.bertscore_model")
        for name, line in self.gate.items():
            if "production" in line and not self.production:
                raise ValueError(f"gate.{name}: compares with production; name it in evaluation.production")
        if (self.metrics or self.functions) and not self.samples:
            raise ValueError("metrics: measure generated text; set evaluation.samples above 0")
        return self


def _near_line(line: str) -> str | None:
    """Returns the likely correction of a gate's line, None for none."""
    meant = f" {line.strip().lower()} ".replace("≤", "<=").replace("≥", ">=").replace("=<", "<=").replace("=>", ">=")
    meant = re.sub(r"\b(at most|no more than)\b", "<=", re.sub(r"\b(at least|no less than)\b", ">=", meant))
    meant = re.sub(r"\b(below|less than|under)\b", "<", re.sub(r"\b(above|more than|over)\b", ">", meant))
    meant = re.sub(r"(\d+(?:\.\d+)?) ?%( of)?", lambda match: f"{float(match[1]) / 100:g} *", meant).replace("* *", "*")
    meant = re.sub(r"\b(than|the|of|is)\b|==?(?=[^=])(?<![<>]=)", " ", meant)
    meant = re.sub(r"(\d) ?[x×] ?|(?<=\w) [x×] ", lambda match: f"{match[1] or ''} * ", meant)
    meant = re.sub(r"([\d.]+)\s*\*?\s*(baseline|production)", r"\2 * \1", meant)
    meant = " ".join(meant.split())
    return meant if GATE.fullmatch(meant) else None


ExportFormat = Literal["safetensors", "adapter", "gguf", "onnx", "mlflow", "oci", "kserve"]
QuantizationType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class GGUF(Section):
    """Files for llama.cpp and tools based on it."""

    types: Annotated[list[QuantizationType], Field(min_length=1)] = ["q8_0"]
    """Weight types, one file each."""


class ONNX(Section):
    """A graph for ONNX Runtime: token ids and mask in, logits out, computed in float32."""

    opset: Annotated[int, Field(ge=18)] = 20
    """Operator set version."""


class Hub(Section):
    """A repository on the Hugging Face Hub; `HF_TOKEN` holds the token."""

    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """`organisation/name`; created if missing."""
    private: bool = True
    """Whether a new repository is private."""
    revision: str = "main"
    """Branch to push to."""


class KServe(Section):
    """`InferenceService` for the model."""

    name: Name | None = None
    """Name; default: the recipe's."""
    namespace: Name | None = None
    """Namespace; default: that of the user who applies it."""
    service_account: Name | None = None
    """Account whose secret holds the store's credentials."""
    model_uri: str | None = None
    """Address to serve from, such as `oci://registry/model:tag` or `pvc://claim/path`; default: the export's."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of the server; default: `resources.gpus`."""


class Export(Section):
    """Final model files; each format is loaded and compared before it counts."""

    formats: Annotated[list[ExportFormat], Field(min_length=1)] = ["safetensors"]
    """`safetensors`: whole model, adapter merged; `adapter` alone; `gguf`; `onnx`; `mlflow` model; `oci` image layout;
    `kserve` manifest."""
    checkpoint: Literal["last", "best"] = "last"
    """State to evaluate and export: the last step, or the lowest evaluation loss, saved when measured."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the whole model's weights; default: as trained."""
    shard_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*(MB|GB)$")] = "5GB"
    """Size limit of a weights file."""
    gguf: GGUF = GGUF()
    """Settings of `gguf`."""
    onnx: ONNX = ONNX()
    """Settings of `onnx`."""
    registered_model: Annotated[str, Field(pattern=r"^[^:/]+$")] | None = None
    """Name in MLflow's registry; each accepted run becomes a version."""
    alias: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")] | None = None
    """Alias to move to the new version, such as `production`; requires a gate that passes."""
    hub: Hub | None = None
    """Push the model to the Hugging Face Hub."""
    kserve: KServe = KServe()
    """Settings of `kserve`."""
    artifact: bool = False
    """Copy the main model's files into Kubeflow's artifact `model`, for components with an `Input[Model]`. Otherwise it
    is the model card, with the address in its metadata."""
    licence: str | None = None
    """Licence of the model, as spelled on the Hub (`apache-2.0`); default: the base model's, if known."""
    check_tokens: Positive = 16
    """Tokens that each format must generate greedily as the trained model does. Formats with rounded weights are
    compared with the model rounded the same."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.formats)) < len(self.formats):
            raise ValueError(f"formats: {', '.join(self.formats)} names one twice")
        if "safetensors" not in self.formats and "adapter" not in self.formats:
            raise ValueError("formats: takes safetensors or adapter at least; the others are made from them")
        if self.alias and not self.registered_model:
            raise ValueError("alias: an alias belongs to a registered model; set export.registered_model")
        if self.registered_model and "mlflow" not in self.formats:
            raise ValueError("registered_model: an MLflow model is registered; add mlflow to export.formats")
        return self
