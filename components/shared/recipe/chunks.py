"""How a run is cut, and where it lives."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from baton.components.shared.core.signing import PublicKey
from baton.components.shared.recipe.base import DURATION, Positive, Quantity, Section, duration, near_duration, seconds

CONTINUOUS = "continuous"
"""Word for checkpoints of which one is always on its way."""
SIGNING_FOLDER = "/var/run/baton-signing"
"""Where pods have the Secret with the private key."""
MAX_CHUNKS = 100
"""A workflow object holds about 1 MiB; a hundred unrolled chunks take a third of it."""


class Keep(Section):
    """Which checkpoints stay in the store. The newest that is whole always does."""

    last: Positive = 2
    """The newest ones."""
    best: Annotated[int, Field(ge=0)] = 1
    """Those with the lowest evaluation loss, where `evaluation.every` or `per_epoch` measures it."""
    every: Positive | None = None
    """Those whose step is a multiple of this."""
    audit: bool = False
    """The last one of each chunk, from which anybody can train any chunk again: see `baton audit`."""


class Signing(Section):
    """Whose signature the checkpoints of a run must have. A chunk signs its own and restores no other."""

    public_key: str
    """The public key in one line, as `baton keys new FILE` prints it, or the text of a PEM file; Ed25519 or ECDSA on
    P-256. The private key is in the file that `BATON_SIGNING_KEY_FILE` names, and never in a recipe."""
    secret: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[-._a-zA-Z0-9]+$")] | None = None
    """On a cluster, the Secret with the private key, as `secret/key`: it is mounted into the chunks' pods."""

    @field_validator("public_key")
    @classmethod
    def _one_line(cls, value: str) -> str:
        return PublicKey.parse(value).line

    @property
    def key_file(self) -> str:
        """Path of the private key in a pod."""
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
    spare: Annotated[int, Field(ge=0, le=MAX_CHUNKS)] = 0
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
    """Sign checkpoints, and resume from none that is not signed: see [signing.md](signing.md)."""
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
        """Steps between checkpoints inside a chunk, where given as steps."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints inside a chunk, where given as a time."""
        is_time = isinstance(self.checkpoint_every, str) and not self.is_continuous
        return seconds(str(self.checkpoint_every)) if is_time else None

    @property
    def is_continuous(self) -> bool:
        """Whether one checkpoint follows the other."""
        return self.checkpoint_every == CONTINUOUS

    @property
    def max_unsaved_seconds(self) -> float:
        """Seconds without a checkpoint after which a chunk gives up."""
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
