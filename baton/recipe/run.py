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
    """An object by its import path, with keyword arguments to make it."""

    use: Annotated[str, Field(pattern=OBJECT)]
    """`module:object`, found in the image or in `hooks.source`."""
    options: dict[str, Any] = {}
    """Keyword arguments."""


class Hooks(Section):
    """The user's own code, from the image or from `source`, which travels with the run."""

    source: str | None = None
    """A Python file or a folder of them, here or `s3://…`; its content is part of the run's identity."""
    callbacks: list[Annotated[Hook, shorthand("use")]] = []
    """Classes of `TrainerCallback`, made with their options. One with `state_dict` and `load_state_dict` is kept across
    chunks, as are plain values and arrays of any hook."""
    collator: Annotated[Hook, shorthand("use")] | None = None
    """Called with `tokenizer` and its options, returns what joins rows to a batch. Random numbers it draws are seeded
    for each batch, so that they do not depend on where chunks end."""
    loss: Annotated[Hook, shorthand("use")] | None = None
    """Called with `outputs`, `labels`, `num_items_in_batch` and its options, returns the loss; for `sft` and
    `pretrain`."""
    metrics: list[Annotated[Hook, shorthand("use")]] = []
    """Called with the `EvalPrediction` of an evaluation and its options, return a mapping of names to numbers."""
    trainer: Annotated[str, Field(pattern=OBJECT)] | None = None
    """A class to put in front of the method's own trainer: its methods come first and may call `super()`."""

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
    """Which checkpoints stay in the store. The newest that is whole always does."""

    last: Positive = 2
    """The newest ones."""
    best: Annotated[int, Field(ge=0)] = 1
    """Those with the lowest evaluation loss, where `evaluation.every` or `per_epoch` measures it."""
    every: Positive | None = None
    """Those whose step is a multiple of this."""
    audit: bool = False
    """The last one of each chunk, from which anybody can train any chunk again: see `baton verify replay`."""


class Signing(Section):
    """Whose signature the checkpoints of a run must have. A chunk signs its own and restores no other."""

    public_key: str
    """The public key in one line, as `baton verify keys new FILE` prints it, or the text of a PEM file; Ed25519 or
    ECDSA on P-256. The private key is in the file that `BATON_SIGNING_KEY_FILE` names, and never in a recipe."""
    secret: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[-._a-zA-Z0-9]+$")] | None = None
    """On a cluster, the Secret with the private key, as `secret/key`: it is mounted into the chunks' pods."""

    @field_validator("public_key")
    @classmethod
    def _one_line(cls, value: str) -> str:
        return PublicKey.parse(value).line

    @property
    def key_file(self) -> str:
        return f"{SIGNING_FOLDER}/{(self.secret or '').partition('/')[2]}"


class Preemption(Section):
    """Where a train-chunk learns that its machine will be preempted. SIGTERM always counts."""

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

    count: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] | Literal["per-epoch"] = 1
    """Number of train-chunks, each its own pod, of the same number of steps. `per-epoch` ends one with each epoch:
    `training.epochs`, rounded up, is their number, fixed when the pipeline is compiled."""
    spare: Annotated[int, Field(ge=0, le=MAX_CHUNKS), WrittenAs("extra")] = 0
    """Further chunks at the end that finish what preempted ones left; they return at once where nothing is left."""
    checkpoint_every: Positive | str | None = None
    """Checkpoints inside a chunk: a number of steps, or a time such as `30s`, `5m`, `1h`. `continuous` takes the next
    one when the last has arrived, but leaves so much time between them that they hold training for 2% of it at most,
    and cost 5% in all."""
    checkpoints_per_epoch: Positive | None = None
    """Checkpoints inside a chunk, so many in each epoch and the last one at its end, instead of `checkpoint_every`;
    the steps are those of `evaluation.per_epoch`."""
    wait_for_commit: bool = False
    """Hold training until each checkpoint is in the store. Off, it continues meanwhile, and a checkpoint that falls due
    before the one on its way has arrived is taken when it has."""
    keep: Keep = Keep()
    """Which checkpoints stay."""
    signing: Signing | None = None
    """Sign checkpoints, and resume from none that is not signed: see docs/trust/signing.md."""
    max_unsaved: Annotated[str, BeforeValidator(duration)] = "30m"
    """How long training continues while the store takes no checkpoint; then the chunk fails."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Times a chunk's process is started again in its pod where a fresh one may do better: after a signal, an error of
    the device or of the link between ranks, a store that was out of reach; not after a user's mistake, where memory ran
    out, nor where training breaks the device twice after the same step. With `resources.nodes`, times another job
    follows one that has lost a node. Each pod that `resources.retries` start has as many:
    `(1 + chunks.retries) × (1 + resources.retries)` processes a chunk at most, and no more than 36."""
    preemption: Preemption = Preemption()
    """Where a chunk learns that it must go."""
    exactness: Literal["bitwise", "consistent"] = "consistent"
    """`bitwise` refuses to resume where hardware or software differ from the checkpoint's, or state of your own code is
    not carried; `consistent` resumes and says so in log and proof."""

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
            raise ValueError("checkpoint_every and checkpoints_per_epoch both say when to save; leave one out")
        if self.is_continuous and self.wait_for_commit:
            raise ValueError("checkpoint_every: continuous does not go with wait_for_commit, which holds training")
        return self


class Store(Section):
    """Where runs and data live."""

    uri: str = "baton-store"
    """A folder, `s3://bucket[/prefix]`, `gs://bucket[/prefix]` or `az://container[/prefix]`."""
    cache_dir: str | None = None
    """A folder on the node, in memory or on a fast disk, from which the next pod takes what it finds by its hash."""
    cache_size: Quantity = "50Gi"
    """Size of `cache_dir` at which the files used longest ago are removed."""


NONE = ("none", "null", "off", "no", "false", "disabled", "")  # words for no tracking


def _address_or_none(value: Any) -> Any:
    return None if value is False or (isinstance(value, str) and value.strip().lower() in NONE) else value


class Tracking(Section):
    """Where metrics go."""

    mlflow: Annotated[str | None, BeforeValidator(_address_or_none)] = "sqlite:///mlflow.db"
    """MLflow tracking URI; null, none or off turns tracking off, but where Kubeflow gives its pods the address of its
    own MLflow."""
    mlflow_page: Annotated[str | None, WrittenAs("mlflow_ui_url")] = None
    """Address at which people reach MLflow, for links, where it is another than `mlflow`."""
    experiment: str | None = None
    """MLflow experiment; the recipe's name when left out, in Kubeflow's own MLflow the Kubeflow run's."""
    tensorboard: bool = False
    """Also write event files, to `tensorboard/` below the run; needs the package `tensorboard`."""
    wandb: str | None = None
    """Also report to this project of Weights & Biases; needs the package `wandb`, and its key in the pod's environment
    (`resources.secret_env`). With `WANDB_MODE=offline` there, its folders are put below the run's `wandb/`, for
    `wandb sync`."""
    jsonl: bool = False
    """Also write JSON Lines, an object for each logged step, to `metrics/` below the run."""
    prometheus_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Port at which each train-chunk serves its figures to Prometheus, as `/metrics`; not at all when left out."""
    cards: Literal["rows", "counts"] = "rows"
    """What Kubeflow's artifacts show of the data: the first `rows` and sequences, examples and samples as well, or
    `counts` alone, so that no text of yours leaves the store for Kubeflow's bucket."""
