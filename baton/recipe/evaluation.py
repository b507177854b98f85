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
    """Names of tasks or groups, such as `gsm8k` or `hellaswag`."""
    include_path: str | None = None
    """Folder with tasks of your own, as YAML files, here or `s3://…`."""
    few_shot: Annotated[int, Field(ge=0)] | None = None
    """Examples in front of each question; the task's own number when left out."""
    limit: Positive | None = None
    """Documents per task; all when left out."""
    render_as: Literal["auto", "chat", "text"] = "auto"
    """Whether questions are turns of the chat template, each example in front of them a turn of its own, `data.system`
    before all. `auto`: where training saw conversations, or `data.render_as` would make some of prompts and answers;
    a model in use without a template is asked as text."""


class Evaluation(Section):
    """How the result is judged: always against the model that training started from."""

    samples: Annotated[int, Field(ge=0)] = 8
    """Held-out rows for which the model writes, before and after training; `metrics` are taken over them."""
    max_new_tokens: Positive = 64
    """Longest sample in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Of the sampling; 0 takes the likeliest token each time."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability that sampling draws from."""
    metrics: list[Metric] = []
    """What is measured between what the model writes and the row's own answer: `exact_match`, `numeric_match` (the last
    number), `bleu` and `chrf` (sacreBLEU), `rouge` (1, 2 and L), `bertscore`."""
    functions: list[Annotated[Hook, shorthand("use")]] = []
    """Functions of your own, from the image or `hooks.source`: called with the lists `prompts`, `completions` and
    `references`, and their options, return a number for each."""
    bertscore_model: str | None = None
    """Encoder for `bertscore`: hub id or folder."""
    tasks: Tasks | None = None
    """Tasks of the LM evaluation harness; needs the package `lm-eval`."""
    production: str | None = None
    """The model now in use, to compare with: folder, `s3://…`, hub id, `models:/name@alias` of MLflow's registry, or
    `accepted`, the one that the last retraining promoted. Where there is none yet of an alias or of `accepted`, that
    counts as no model."""
    confidence: Fraction = 0.95
    """Level of the intervals, by bootstrap over the rows."""
    gate: dict[str, str] = {}
    """What must hold, by the name of a figure: `{perplexity: "<= baseline * 0.98", numeric_match: ">= production"}`. A
    run that fails is rejected and exports nothing. A line against `production` holds where there is none yet."""
    every: Positive | None = None
    """Steps between evaluations during training; none when left out."""
    per_epoch: Positive | None = None
    """Evaluations in each epoch, the last one at its end, instead of `every`. In an epoch of S steps the k-th of n
    comes after step k × S / n, rounded up; where n is more than S, after each step."""
    write_every: Annotated[Positive | None, WrittenAs("sample_every")] = None
    """Steps after which the model writes for the samples in the course of training, as after it: the texts go to
    `samples/` below the run, how many are right and what `metrics` and `functions` say of them to the metrics, as
    `written_…`. None when left out; training is not changed by it."""
    batch_size: Positive | None = None
    """Rows per forward pass; `training.micro_batch_size` when left out."""

    @field_validator("gate")
    @classmethod
    def _lines(cls, value: dict[str, str]) -> dict[str, str]:
        for name, line in value.items():
            if not GATE.fullmatch(line.strip()):
                meant = _near_line(line) if len(line) <= LONGEST_LINE else None
                example = f"; did you mean {meant!r}?" if meant else ", for example '<= baseline * 0.98'"
                raise ValueError(
                    f"{name}: {line[:LONGEST_LINE]!r} is no line of a gate; expected <=, >=, < or > and a number, "
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
            raise ValueError("every and per_epoch both say when to evaluate; leave one out")
        if "bertscore" in self.metrics and not self.bertscore_model:
            raise ValueError("metrics: bertscore needs an encoder; name one in evaluation.bertscore_model")
        for name, line in self.gate.items():
            if "production" in line and not self.production:
                raise ValueError(f"gate.{name}: compares with production; name it in evaluation.production")
        if (self.metrics or self.functions) and not self.samples:
            raise ValueError("metrics: are taken over what the model writes; set evaluation.samples above 0")
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
    """A file for llama.cpp and what is built on it."""

    types: Annotated[list[QuantizationType], Field(min_length=1)] = ["q8_0"]
    """Types of the weights; a file for each."""


class ONNX(Section):
    """A graph for ONNX Runtime: token ids and mask in, logits out, computed in float32."""

    opset: Annotated[int, Field(ge=18)] = 20
    """Version of the operators."""


class Hub(Section):
    """A repository on the Hugging Face Hub, with the token in `HF_TOKEN`."""

    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """`organisation/name`; made when it is not there."""
    private: bool = True
    """Whether a new repository is private."""
    revision: str = "main"
    """Branch to push to."""


class KServe(Section):
    """The `InferenceService` that serves the model."""

    name: Name | None = None
    """Its name; the recipe's when left out."""
    namespace: Name | None = None
    """Its namespace; that of the user who applies it when left out."""
    service_account: Name | None = None
    """Account whose secret holds the store's credentials."""
    model_uri: str | None = None
    """Address to serve from, such as `oci://registry/model:tag` or `pvc://claim/path`; the export's own when left
    out."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of the server; `resources.gpus` when left out."""


class Export(Section):
    """What is handed out at the end, each format loaded back and compared before it counts."""

    formats: Annotated[list[ExportFormat], Field(min_length=1)] = ["safetensors"]
    """`safetensors`, the whole model, an adapter folded in; `adapter` alone; `gguf`; `onnx`; an `mlflow` model; an
    `oci` image layout; a `kserve` manifest."""
    checkpoint: Literal["last", "best"] = "last"
    """Which state of the run is evaluated and handed out: that of the last step, or the one with the lowest evaluation
    loss, which is then saved when it is measured."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number type of the whole model's weights; as trained when left out."""
    shard_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*(MB|GB)$")] = "5GB"
    """Largest file of weights."""
    gguf: GGUF = GGUF()
    """Of the format `gguf`."""
    onnx: ONNX = ONNX()
    """Of the format `onnx`."""
    registered_model: Annotated[str, Field(pattern=r"^[^:/]+$")] | None = None
    """Name in MLflow's registry; each run that is not rejected becomes a version of it."""
    alias: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")] | None = None
    """Alias that the new version takes over, such as `production`: only with a gate, and only when it held."""
    hub: Hub | None = None
    """Also push the model to the Hugging Face Hub."""
    kserve: KServe = KServe()
    """Of the format `kserve`."""
    artifact: bool = False
    """Also copy the main model's files into Kubeflow's artifact `model`, for components that take an `Input[Model]` and
    load it from there; without it the artifact is the model card, with the address in its metadata."""
    licence: str | None = None
    """Licence of the model, as the Hub spells it (`apache-2.0`); the base model's when left out and known."""
    check_tokens: Positive = 16
    """Tokens that each format must write just as the trained model does, greedily, before it counts; where a format
    rounds the weights, as the model does with them rounded."""

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
