"""The recipe: the user's one document. YAML carries values, this schema carries the defaults."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MAX_CHUNKS = 100
"""A workflow object holds about 1 MiB; a hundred unrolled chunks take a third of it."""

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Quantity = Annotated[
    str,
    Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"),
    BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value),
]
"""A Kubernetes quantity such as `500m`, `4` or `64Gi`."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""Lower-case letters, digits and dashes, at most 63: it becomes a folder, a label and a run's name."""


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class FromScratch(Section):
    """A model built from its configuration instead of a checkpoint."""

    architecture: str = "llama"
    """Model type as Transformers names it: `llama`, `qwen3`, `gpt2`, …"""
    hidden_size: Positive = 256
    """Width of the residual stream."""
    num_hidden_layers: Positive = 4
    """Number of transformer blocks."""
    num_attention_heads: Positive = 4
    """Number of attention heads; must divide `hidden_size`."""
    num_key_value_heads: Positive | None = None
    """Number of key/value heads for grouped-query attention; as many as heads when left out."""
    intermediate_size: Positive | None = None
    """Width of the feed-forward layer; four times `hidden_size` when left out."""
    vocab_size: Positive | None = None
    """Rows of the embedding; the tokenizer's size when left out, never less than it."""
    config: dict[str, Any] = {}
    """Any other setting of the architecture's own configuration, by its Transformers name."""

    @model_validator(mode="after")
    def _heads_divide(self) -> FromScratch:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, which does not divide hidden_size "
                f"{self.hidden_size}; choose a divisor"
            )
        return self


class TrainTokenizer(Section):
    """A byte-level BPE tokenizer learned from the training split."""

    vocab_size: Annotated[int, Field(ge=300)] = 4096
    """Size of the vocabulary, special tokens included; at least the 256 bytes and some merges."""
    min_frequency: Positive = 2
    """How often a pair must occur to be merged."""


class Tokenizer(Section):
    """Where the tokenizer comes from, when it is not the base model's own."""

    train: TrainTokenizer | None = None
    """Learn one from the training split."""
    base: str | None = None
    """Take that of another model: hub id, folder or URI."""

    @model_validator(mode="after")
    def _one_origin(self) -> Tokenizer:
        if (self.train is None) == (self.base is None):
            raise ValueError("give exactly one of train and base")
        return self


class Model(Section):
    """What training starts from: a checkpoint (`base`) or a configuration (`from_scratch`)."""

    base: str | None = None
    """Hub id, folder, or URI such as `s3://bucket/model`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; pin a commit for runs that last."""
    from_scratch: FromScratch | None = None
    """Build the model from this configuration with weights drawn from `seed`."""
    tokenizer: Tokenizer | None = None
    """Needed with `from_scratch`; with `base`, the model's own when left out."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which weights are held; mixed precision is `training.precision`."""
    trust_remote_code: bool = False
    """Run Python code that ships with the checkpoint. Leave off unless you have read it."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.base is None) == (self.from_scratch is None):
            raise ValueError("give exactly one of base and from_scratch")
        if self.from_scratch and self.tokenizer is None:
            raise ValueError(
                "a model trained from scratch needs a tokenizer; add tokenizer: {train: {vocab_size: 4096}} "
                "or tokenizer: {base: …}"
            )
        if self.base and self.tokenizer and self.tokenizer.train:
            raise ValueError("tokenizer.train would not fit the embeddings of base; leave it out")
        size, trained = (
            self.from_scratch and self.from_scratch.vocab_size,
            self.tokenizer and self.tokenizer.train,
        )
        if size and trained and size < trained.vocab_size:
            raise ValueError(f"from_scratch.vocab_size {size} is smaller than the tokenizer's {trained.vocab_size}")
        return self


COLUMNS = ("text", "prompt", "completion", "instruction", "input", "output", "messages")
"""The column names Baton knows, to which `data.columns` maps the source's own."""


class Data(Section):
    """Rows to learn from, and how they become tokens."""

    source: Annotated[list[str], Field(min_length=1)]
    """File, folder, glob, `s3://…`, `hf://datasets/…` or `builtin:stdlib-docs`; one or a list."""
    format: Literal["auto", "text", "prompt-completion", "instruction", "messages"] = "auto"
    """Shape of a row; `auto` looks at the columns of the first rows and says what it found."""
    columns: dict[str, str] = {}
    """Our column name → the source's, for example `{prompt: question, completion: answer}`."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What one row of a text file is."""
    separator: str = "\n"
    """Put between prompt and completion, and counted as prompt."""
    eval_fraction: Fraction = 0.1
    """Share of rows held out. A row's side depends on its content and `seed` alone."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest sequence in tokens; longer ones are cut at the end and counted."""
    packing: bool = False
    """Join rows and cut them into sequences of exactly `max_length`: for plain text."""
    completion_only_loss: bool = True
    """Leave the prompt out of the loss where a row has one."""
    max_samples: Positive | None = None
    """Use at most this many rows, taken from the start."""
    max_rejected: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may be unreadable before the run stops; they are kept with their reasons."""

    @field_validator("source", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in COLUMNS:
                raise ValueError(f"maps {name!r}, which is none of {', '.join(COLUMNS)} (ours on the left side)")
        return value


class Adapter(Section):
    """A low-rank adapter trained in place of the full weights."""

    type: Literal["lora"] = "lora"
    """Kind of adapter."""
    r: Positive = 16
    """Rank of the update matrices."""
    alpha: Positive = 32
    """Scale: the update is multiplied by `alpha / r`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] | str | None = None
    """Names of layers or a pattern; PEFT's default for the architecture when left out."""


class Training(Section):
    """How the model learns."""

    method: Literal["sft"] = "sft"
    """Training method."""
    batch_size: Positive = 8
    """Rows per optimizer step: what the optimizer sees."""
    micro_batch_size: Positive | None = None
    """Rows per forward pass: what memory sees. Must divide `batch_size`; equal to it when left out."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows; 1 when neither this nor `max_steps` is given."""
    max_steps: Positive | None = None
    """Optimizer steps, instead of `epochs`."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate."""
    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"] = (
        "linear"
    )
    """Learning-rate schedule over the whole run, whatever the chunks."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradient norm above which gradients are scaled down; 0 turns clipping off."""
    optimizer: Literal["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"] = "adamw_torch"
    """Optimizer, by its Transformers name."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward; `bf16` and `fp16` are mixed precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    log_every: Positive = 1
    """Steps between logged losses."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that prepare batches."""
    threads: Positive | None = None
    """CPU threads of torch. Bits depend on it, so the first chunk's number holds for the run."""
    deterministic: bool = True
    """Refuse kernels whose result varies from call to call."""

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("give epochs or max_steps, not both")
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            divisors = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide batch_size {self.batch_size}; "
                f"choose one of {', '.join(map(str, divisors))}"
            )
        return self

    @property
    def micro(self) -> int:
        """Rows per forward pass."""
        return self.micro_batch_size or self.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return self.batch_size // self.micro


_DURATION = re.compile(r"0*([1-9][0-9]*)(s|m|h)")


def _duration(value: Any) -> Any:
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return value
    raise ValueError(f"is {value!r}; expected a time such as 30s, 5m, 1h")


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    assert match, text
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


class Keep(Section):
    """Which checkpoints stay in the store. The newest that is whole always does."""

    last: Positive = 2
    """The newest ones."""
    best: Annotated[int, Field(ge=0)] = 1
    """Those with the lowest evaluation loss, where `evaluation.every` measures it."""
    every: Positive | None = None
    """Those whose step is a multiple of this."""


class Preemption(Section):
    """Where a train-chunk learns that its machine will be taken away. SIGTERM always counts."""

    notice_file: str | None = None
    """A file whose appearance is the notice."""
    notice_url: str | None = None
    """`aws`, `gcp` or `azure` for the cloud's own metadata endpoint, or an address whose answer 200 is the notice."""
    node_taints: list[str] = []
    """Taint keys of the pod's node that are the notice, such as `cloud.google.com/impending-node-termination`; needs
    the right to read nodes."""

    @field_validator("notice_url")
    @classmethod
    def _known_place(cls, value: str | None) -> str | None:
        if value is None or value in ("aws", "gcp", "azure") or value.startswith(("http://", "https://")):
            return value
        raise ValueError(f"is {value!r}; expected aws, gcp, azure or an http address")


class Chunks(Section):
    """How the run is cut into processes that hand on to each other."""

    count: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] = 1
    """Number of train-chunks, each a pod of its own."""
    spare: Annotated[int, Field(ge=0, le=MAX_CHUNKS)] = 0
    """Further chunks at the end that finish what preempted ones left; they return at once where nothing is left."""
    checkpoint_every: Positive | str | None = None
    """Checkpoints inside a chunk: a number of steps, or a time such as `30s`, `5m`, `1h`."""
    wait_for_commit: bool = False
    """Hold training until each checkpoint is in the store. Off, it goes on meanwhile, and a checkpoint that falls due
    before the one on its way has arrived is taken when it has."""
    keep: Keep = Keep()
    """Which checkpoints stay."""
    max_unsaved: Annotated[str, BeforeValidator(_duration)] = "30m"
    """How long training goes on while the store takes no checkpoint; then the chunk fails."""
    preemption: Preemption = Preemption()
    """Where a chunk learns that it must go."""
    exactness: Literal["bitwise", "consistent"] = "consistent"
    """`bitwise` refuses to go on where hardware or software differ from the checkpoint's;
    `consistent` goes on and says so in log and proof."""

    @field_validator("checkpoint_every", mode="before")
    @classmethod
    def _steps_or_duration(cls, value: Any) -> Any:
        steps = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value is None or steps or (isinstance(value, str) and _DURATION.fullmatch(value)):
            return value
        raise ValueError(f"is {value!r}; expected a number of steps or a time such as 30s, 5m, 1h")

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints inside a chunk, where given as steps."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints inside a chunk, where given as a time."""
        return _seconds(self.checkpoint_every) if isinstance(self.checkpoint_every, str) else None

    @property
    def max_unsaved_seconds(self) -> float:
        """Seconds without a checkpoint after which a chunk gives up."""
        return _seconds(self.max_unsaved)

    @model_validator(mode="after")
    def _fits_a_workflow(self) -> Chunks:
        if self.count + self.spare > MAX_CHUNKS:
            raise ValueError(f"{self.count} chunks and {self.spare} spare ones are more than {MAX_CHUNKS}; use fewer")
        return self


class Store(Section):
    """Where runs and data live."""

    uri: str = "baton-store"
    """A folder or `s3://bucket[/prefix]`."""
    cache_dir: str | None = None
    """A folder on the node, in memory or on a fast disk, from which the next pod takes what it finds by its hash."""
    cache_size: Quantity = "50Gi"
    """Size of `cache_dir` at which the files used longest ago are removed."""


def _short_store(value: Any) -> Any:
    return {"uri": value} if isinstance(value, str) else value


class Evaluation(Section):
    """How the result is judged against the start."""

    samples: Annotated[int, Field(ge=0)] = 8
    """Held-out rows for which the model writes, before and after training."""
    max_new_tokens: Positive = 64
    """Longest sample in tokens."""
    every: Positive | None = None
    """Steps between evaluations during training; none when left out."""
    batch_size: Positive | None = None
    """Rows per forward pass; `training.micro_batch_size` when left out."""


class Export(Section):
    """What is handed out at the end."""

    format: Literal["safetensors"] = "safetensors"
    """File format of the weights."""
    merge_adapter: bool = True
    """Fold the adapter into the base weights; off exports the adapter alone."""


class Toleration(Section):
    """A Kubernetes toleration of the pods that run the model."""

    key: str | None = None
    """Taint key; every taint when left out."""
    operator: Literal["Equal", "Exists"] = "Exists"
    """How the key is matched."""
    value: str | None = None
    """Taint value, with `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect tolerated; all when left out."""


class Resources(Section):
    """What the pods ask for. Accelerators, memory, nodes and tolerations are those of the pods that run the model
    (train-chunk, evaluate); retries are the train-chunks'."""

    image: str = "baton-python:0.1.0"
    """Container image with Baton installed."""
    accelerator: str = "nvidia.com/gpu"
    """Resource name of the accelerator."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Accelerators per pod that runs the model; 0 trains on the CPU."""
    cpu: Quantity | None = None
    """CPU request and limit of a pod that runs the model."""
    memory: Quantity | None = None
    """Memory request and limit of a pod that runs the model."""
    shm: Quantity | None = "2Gi"
    """Size of `/dev/shm` in a pod that runs the model; counts as its memory."""
    node_selector: dict[str, str] = {}
    """Node labels such a pod needs."""
    tolerations: list[Toleration] = []
    """Taints such a pod puts up with: spot nodes usually have one."""
    labels: dict[str, str] = {}
    """Labels on every pod."""
    secret: str | None = None
    """Name of a Secret with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, given to every pod as environment."""
    image_pull_secret: str | None = None
    """Name of the Secret for a private registry."""
    cache_claim: str | None = None
    """Name of a PersistentVolumeClaim mounted at `store.cache_dir` in pods that run the model."""
    env: dict[str, str] = {}
    """Plain environment of every pod, such as `AWS_ENDPOINT_URL`. Never credentials."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Times a failed train-chunk is started again; it goes on from its newest checkpoint."""

    @field_validator("env")
    @classmethod
    def _no_credentials(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if re.search(r"SECRET|PASSWORD|TOKEN(?!IZER)|ACCESS_KEY|CREDENTIAL", name, re.IGNORECASE):
                raise ValueError(f"holds {name}, which looks like a credential; name its Secret in resources.secret")
        return value


class Tracking(Section):
    """Where metrics go."""

    mlflow: str | None = "sqlite:///mlflow.db"
    """MLflow tracking URI; null turns tracking off."""
    experiment: str | None = None
    """MLflow experiment; the recipe's name when left out."""


class Recipe(Section):
    """One training run, from rows to an exported model."""

    name: Name
    """Name of the pipeline and prefix of its runs: lower-case letters, digits, dashes."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Decides the split, the initial weights, the order of rows and every random draw."""
    store: Annotated[Store, BeforeValidator(lambda value: {"uri": value} if isinstance(value, str) else value)] = (
        Store()
    )
    """Where runs and data live; `store: s3://bucket` is short for its `uri`."""
    model: Model
    """What training starts from."""
    data: Data
    """What it learns from."""
    adapter: Adapter | None = None
    """Train an adapter; the full weights when left out."""
    training: Training = Training()
    """How it learns."""
    chunks: Chunks = Chunks()
    """How the run is cut."""
    evaluation: Evaluation = Evaluation()
    """How it is judged."""
    export: Export = Export()
    """What comes out."""
    resources: Resources = Resources()
    """What the pods ask for."""
    tracking: Tracking = Tracking()
    """Where metrics go."""

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.adapter and self.model.from_scratch:
            raise ValueError(
                "adapter: an adapter on a model trained from scratch would freeze random weights; "
                "remove adapter, or give model.base"
            )
        steps = self.training.max_steps
        if steps is not None and self.chunks.count > steps:
            raise ValueError(f"chunks.count: {self.chunks.count} chunks for {steps} steps; at most one per step")
        if self.training.precision == "fp16" and self.resources.gpus == 0:
            raise ValueError("training.precision: fp16 needs an accelerator; set resources.gpus, or use bf16 or fp32")
        if self.data.format == "messages" and self.data.packing:
            raise ValueError("data.packing: conversations are not packed; set it to false")
        if self.resources.cache_claim and not self.store.cache_dir:
            raise ValueError(
                "resources.cache_claim: a claim is mounted at store.cache_dir, which is not set; "
                "set it, for example to /cache, or remove the claim"
            )
        return self
