"""Recipe sections `hooks`, `trust`, `chunks`, `store` and `tracking`: how and where a run runs."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from baton.recipe.base import DURATION, Positive, Quantity, Section, WrittenAs, duration, near_duration, seconds
from baton.signing import PublicKey

OBJECT = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"  # `module:object`


def shorthand(key: str) -> BeforeValidator:
    """Returns a validator that takes a plain string for a section with that one field set."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class Hook(Section):
    """An object by import path, with its keyword arguments."""

    use: Annotated[str, Field(pattern=OBJECT)]
    """`module:object`, from the image or `hooks.source`."""
    options: dict[str, Any] = {}
    """Keyword arguments."""


class Hooks(Section):
    """Your own code, from the image or from `source`, which is stored with the run."""

    source: str | None = None
    """Python file or folder, local or `s3://…`; its content is part of the run's identity."""
    callbacks: list[Annotated[Hook, shorthand("use")]] = []
    """Classes of `TrainerCallback` with their options. Checkpoints keep state of `state_dict` and `load_state_dict`,
    and plain values and arrays of any hook."""
    collator: Annotated[Hook, shorthand("use")] | None = None
    """Takes `tokenizer` and its options, returns a function that joins rows to a batch. Its random numbers are seeded
    per batch, independent of chunks."""
    loss: Annotated[Hook, shorthand("use")] | None = None
    """Takes `outputs`, `labels`, `num_items_in_batch` and its options, returns the loss; for `sft` and `pretrain`."""
    metrics: list[Annotated[Hook, shorthand("use")]] = []
    """Take the `EvalPrediction` of an evaluation and their options, return a mapping of names to numbers."""
    trainer: Annotated[str, Field(pattern=OBJECT)] | None = None
    """Class to inherit first, in front of the method's trainer; its methods may call `super()`."""

    @field_validator("source")
    @classmethod
    def _is_code(cls, value: str | None) -> str | None:
        if value is not None and re.search(r"\.(zip|whl|egg|tar|gz)$", value):
            raise ValueError(f"is {value!r}; expected a Python file or a folder of them")
        return value


ASK = "ask"  # value of `trust` for somebody else's recipe: its code waits for consent
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Trust = Literal["ask"] | list[Sha256] | None  # `ask`, or digests of the files with consent; None for one's own recipe

# Settings that are or name code: hooks, a model's own code, the harness's tasks, and an interpreter's variables.
_CODE = re.compile(r"(^|\.)hooks\..+|\.trust_remote_code(\.\d+)?$|\.tasks\.include_path(\.\d+)?$|^resources\.env\.")
# Settings that name a function: one of Baton's, or `module:object`.
_MAY_BE_CODE = re.compile(r"(^|\.)use$|(^|\.)(rewards|functions)(\.\d+)+$")


def leaves(node: object, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields a document's scalars, each with its dotted path."""
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if children is None:
        yield place, node
    for key, value in children or ():
        yield from leaves(value, f"{place}.{key}".lstrip("."))


def code_in(document: Mapping[str, Any]) -> list[str]:
    """Returns the settings of a recipe's plain values that run code, phases and sweep included, as `path: value`."""
    return [f"{path}: {value}" for path, value in leaves(document) if value and _is_code(path, value)]


def _is_code(path: str, value: object) -> bool:
    return bool(_CODE.search(path) or (_MAY_BE_CODE.search(path) and ":" in str(value)))


CONTINUOUS = "continuous"  # cadence with a checkpoint always on its way
SIGNING_FOLDER = "/var/run/baton-signing"  # pods' folder of the Secret with the private key
MAX_CHUNKS = 100  # a workflow object holds about 1 MiB; a hundred unrolled chunks take a third of it


class Keep(Section):
    """Checkpoints to keep. The newest complete one always stays."""

    last: Positive = 2
    """Number of newest checkpoints."""
    best: Annotated[int, Field(ge=0)] = 1
    """Number of checkpoints with the lowest evaluation loss, measured by `evaluation.every` or `per_epoch`."""
    every: Positive | None = None
    """Keep each step that is a multiple of this."""
    audit: bool = False
    """Keep the last checkpoint of each chunk, to replay any chunk with `baton verify replay`."""


class Signing(Section):
    """Required signature of checkpoints and seals. A stage signs its work and uses no other."""

    public_key: str
    """Public key in one line, as printed by `baton verify keys new FILE`, or a PEM text; Ed25519 or ECDSA on P-256.
    `BATON_SIGNING_KEY_FILE` names the private key's file, never part of a recipe."""
    secret: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[-._a-zA-Z0-9]+$")] | None = None
    """On a cluster: Secret with the private key, as `secret/key`, mounted into pods of stages."""

    @field_validator("public_key")
    @classmethod
    def _one_line(cls, value: str) -> str:
        return PublicKey.parse(value).line

    @property
    def key_file(self) -> str:
        return f"{SIGNING_FOLDER}/{(self.secret or '').partition('/')[2]}"


class Preemption(Section):
    """Sources of a preemption notice for a train-chunk. SIGTERM always counts."""

    notice_file: str | None = None
    """File that signals preemption when it appears."""
    notice_url: str | None = None
    """Metadata endpoint of `aws`, `gcp` or `azure`, or an address that answers 200 on preemption."""
    node_taints: list[str] = []
    """Taint keys of the node that signal preemption, such as `cloud.google.com/impending-node-termination`; needs the
    right to read nodes."""

    @field_validator("notice_url")
    @classmethod
    def _known_place(cls, value: str | None) -> str | None:
        if value is None or value in ("aws", "gcp", "azure") or value.startswith(("http://", "https://")):
            return value
        raise ValueError(f"is {value!r}; expected aws, gcp, azure or an http address")


class Chunks(Section):
    """Parts of the run, each a process that resumes from the previous one's checkpoint."""

    count: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] | Literal["per-epoch"] = 1
    """Number of train-chunks, each its own pod with an equal number of steps. `per-epoch`: one for each of
    `training.epochs`, rounded up, fixed at compile time."""
    spare: Annotated[int, Field(ge=0, le=MAX_CHUNKS), WrittenAs("extra")] = 0
    """Further chunks at the end for work of preempted ones; they return at once if none remains."""
    checkpoint_every: Positive | str | None = None
    """Steps or time between checkpoints within a chunk, such as `100`, `30s`, `5m`, `1h`. `continuous`: as often as
    possible, within 2% of time with training on hold and 5% overall cost."""
    checkpoints_per_epoch: Positive | None = None
    """Checkpoints per epoch, the last at its end, instead of `checkpoint_every`."""
    wait_for_commit: bool = False
    """Hold training until each checkpoint is in the store. Otherwise a checkpoint due during an upload waits for its
    end."""
    keep: Keep = Keep()
    """Checkpoints to keep."""
    signing: Signing | None = None
    """Sign checkpoints and seals, and use only signed ones: see docs/trust/signing.md."""
    max_unsaved: Annotated[str, BeforeValidator(duration)] = "30m"
    """Time that training continues while the store refuses checkpoints; then the chunk fails."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Restarts of a chunk's process in its pod, after a signal, a device or link error, or an unreachable store. None
    follows a user error, lack of memory, or two device failures after the same step. With `resources.nodes`: new jobs
    after a lost node. At most `(1 + chunks.retries) × (1 + resources.retries)` processes a chunk, and 36."""
    preemption: Preemption = Preemption()
    """Sources of a preemption notice."""
    exactness: Literal["bitwise", "consistent"] = "consistent"
    """`bitwise`: refuse to resume on other hardware or software, or with hook state that checkpoints cannot hold.
    `consistent`: resume, and report it in log and proof."""

    @field_validator("checkpoint_every", mode="before")
    @classmethod
    def _steps_orduration(cls, value: Any) -> Any:
        steps = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value is None or steps or (isinstance(value, str) and (value == CONTINUOUS or DURATION.fullmatch(value))):
            return value
        expected = f"a number of steps, a time such as 30s, 5m, 1h, or {CONTINUOUS}"
        raise ValueError(f"is {value!r}; expected {expected}{near_duration(value)}")

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints inside a chunk; None for a time."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints inside a chunk; None for steps."""
        is_time = isinstance(self.checkpoint_every, str) and not self.is_continuous
        return seconds(str(self.checkpoint_every)) if is_time else None

    @property
    def is_continuous(self) -> bool:
        return self.checkpoint_every == CONTINUOUS

    @property
    def max_unsaved_seconds(self) -> float:
        return seconds(self.max_unsaved)

    @model_validator(mode="after")
    def _one_cadence(self) -> Self:
        if self.checkpoint_every and self.checkpoints_per_epoch:
            raise ValueError("checkpoint_every and checkpoints_per_epoch both set the steps of checkpoints; remove one")
        if self.is_continuous and self.wait_for_commit:
            raise ValueError("checkpoint_every: continuous does not go with wait_for_commit, which holds training")
        return self


class Store(Section):
    """Location of runs and data."""

    uri: str = "baton-store"
    """Folder, `s3://bucket[/prefix]`, `gs://bucket[/prefix]` or `az://container[/prefix]`."""
    cache_dir: str | None = None
    """Folder on the node, in memory or on a fast disk, with files by hash for the next pod."""
    cache_size: Quantity = "50Gi"
    """Size limit of `cache_dir`; the least recently used files are removed."""


NONE = ("none", "null", "off", "no", "false", "disabled", "")  # words for no tracking


def _address_or_none(value: Any) -> Any:
    return None if value is False or (isinstance(value, str) and value.strip().lower() in NONE) else value


class Tracking(Section):
    """Destinations of metrics."""

    mlflow: Annotated[str | None, BeforeValidator(_address_or_none)] = "sqlite:///mlflow.db"
    """MLflow tracking URI; null, none or off turn it off, unless Kubeflow gives its pods an MLflow of its own."""
    mlflow_page: Annotated[str | None, WrittenAs("mlflow_ui_url")] = None
    """MLflow address for links, if other than `mlflow`."""
    experiment: str | None = None
    """MLflow experiment. Default: the recipe's name; in Kubeflow's own MLflow, the Kubeflow run's."""
    tensorboard: bool = False
    """Write event files to the run's `tensorboard/`; needs the package `tensorboard`."""
    wandb: str | None = None
    """Project of Weights & Biases. Needs the package `wandb`, and its key in the environment (`resources.secret_env`).
    `WANDB_MODE=offline` writes folders to the run's `wandb/`, for `wandb sync`."""
    jsonl: bool = False
    """Write JSON Lines, an object per logged step, to the run's `metrics/`."""
    prometheus_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port of each train-chunk for Prometheus, path `/metrics`; default: none."""
    cards: Literal["rows", "counts"] = "rows"
    """Data in Kubeflow's artifacts. `rows`: first rows, sequences, examples and samples; `counts`: numbers alone, so no
    text reaches Kubeflow's bucket."""
