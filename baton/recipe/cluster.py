"""Recipe sections `resources` and `training.parallel`: the pods of a run, and several processes in each."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, field_validator, model_validator

from baton.machine import PROMISED_GPUS
from baton.recipe.base import Quantity, Section, WrittenAs, duration, seconds

MAX_NODES = 512  # a chunk's pod looks at the logs and states of all its job's pods every few seconds

# Keys of the store's Secret, and environment variables of the same names.
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


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


NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]


class Nodes(Section):
    """As many pods as the cluster gives, within bounds: a chunk begins with the most and takes fewer where those cannot
    be had. Numbers between are those for which pods × processes divides `training.parallel.virtual_workers`."""

    min: NodeCount = 1
    """Fewest pods that may train a chunk."""
    max: NodeCount
    """Most pods that may train a chunk."""
    patience: Annotated[str, BeforeValidator(duration)] = "5m"
    """How long a chunk waits for pods that no machine or quota has room for, before it takes the next smaller number;
    with the smallest it waits for `wait_for_nodes`."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max {self.max}; expected a min no larger than max")
        return self


_COUNT, _RANGE = TypeAdapter[int](NodeCount), TypeAdapter(Nodes)


class Resources(Section):
    """What the pods ask for. Accelerators, memory, nodes and tolerations are those of the pods that run the model
    (train-chunk, evaluate)."""

    profile: Literal["cpu", "mps", "cuda-small", "cuda-large", "auto"] | None = None
    """Kind of machine, which chooses precision, optimizer, attention, workers and what pods ask for wherever the recipe
    leaves them out; `baton check` prints the choices. `cuda-small` is a GPU of up to 24 GB. `auto` follows this machine
    in local runs, and `gpus`, `gpu_memory` and `node_selector` on a cluster."""
    image: str = "baton-python:0.1.0"
    """Container image with Baton installed."""
    accelerator: str = "nvidia.com/gpu"
    """Resource name of the accelerator."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Accelerators per pod that runs the model; 0 trains on the CPU."""
    nodes: NodeCount | Nodes = 1
    """Pods that train a chunk together, each with `gpus` accelerators, as a rule on separate nodes; `{min: 1, max: 4}`
    takes as many of them as the cluster gives. More than one needs Kubeflow Trainer 2.2 or newer: the chunk's own pod
    then only creates a `TrainJob` and follows it."""
    runtime: Annotated[str, Field(pattern=r"^(cluster/)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")] = "baton"
    """With `nodes`: Trainer's runtime, a `TrainingRuntime` of the namespace, as in `k8s/components/trainer`, or
    `cluster/NAME` for a `ClusterTrainingRuntime`, such as `cluster/torch-distributed`."""
    wait_for_nodes: Annotated[str, BeforeValidator(duration)] = "1h"
    """With `nodes`: how long a chunk waits until all of them run; then it fails and names what they wait for."""
    gpu_memory: Quantity | None = None
    """Memory of one accelerator, which `baton check` compares its estimate with; when left out, as far as known from
    `node_selector` or from this machine."""
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
    capacity: Literal["spot", "on-demand"] | None = None
    """Kind of nodes, as the label `baton/capacity` of a pod that runs the model. Kubeflow cannot give a pod a priority
    class; a policy of the cluster can, by this label."""
    secret: str | None = None
    """Name of a Secret with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, given to every pod as environment."""
    secret_env: dict[str, Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[-._a-zA-Z0-9]+$")]] = {}
    """Further credentials of every pod: environment variable → `secret/key`, such as `{HF_TOKEN: hub/token}` for
    private models and `export.hub`."""
    image_pull_secret: str | None = None
    """Name of the Secret for a private registry."""
    cache_claim: str | None = None
    """Name of a PersistentVolumeClaim mounted at `store.cache_dir` in pods that run the model."""
    env: dict[str, str] = {}
    """Plain environment of every pod, such as `AWS_ENDPOINT_URL`. Never credentials."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Times a pod of data split, tokenize, learning-rate finder, train-chunk, evaluate or export is started again; a
    train-chunk resumes from its newest checkpoint. Which ends of a pod count is up to the installation: Kubeflow
    Pipelines 2.17 starts one again that was deleted, and not one that ended with an error; Argo by itself does the
    opposite. `chunks.extra` and submitting again help in both. A train-chunk's pods have `chunks.retries` each."""
    deadline: Annotated[str, BeforeValidator(duration)] | None = None
    """Time such as `72h` after which Kubeflow ends the whole run, whatever it is doing."""
    keep_pods: Annotated[str, BeforeValidator(duration)] | None = None
    """Time such as `48h` for which the pods of a run that has ended stay, and their logs; as long as the cluster keeps
    them when left out."""
    run_as_non_root: bool = True
    """Tell Kubernetes to refuse an image that runs as root; the namespace policy `restricted` asks for it."""

    @field_validator("nodes", mode="before")
    @classmethod
    def _one_of_two(cls, value: Any) -> Any:
        """Reads only the kind that a value looks like, so that problems are of that kind alone."""
        if isinstance(value, Nodes):
            return value
        return (_RANGE if isinstance(value, dict) else _COUNT).validate_python(value)

    @field_validator("env")
    @classmethod
    def _no_credentials(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if re.search(r"SECRET|PASSWORD|TOKEN(?!IZER)|ACCESS_KEY|CREDENTIAL", name, re.IGNORECASE):
                raise ValueError(f"holds {name}, which looks like a credential; put it into resources.secret_env")
        return value

    @property
    def plain_env(self) -> dict[str, str]:
        """Environment of every pod without secrets."""
        return {"PYTHONUNBUFFERED": "1", **self.env}

    @property
    def promised_env(self) -> dict[str, str]:
        """Environment of the pods that run the model: the GPUs that torch is to see there through CUDA or ROCm."""
        is_known = self.accelerator.startswith(("nvidia.com/", "amd.com/"))
        return {PROMISED_GPUS: str(self.gpus)} if self.gpus and is_known else {}

    @property
    def secrets(self) -> list[tuple[str, dict[str, str]]]:
        """Secret environment of every pod: Secret's name, with its keys → environment variables."""
        named = [(self.secret, {key: key for key in STORE_KEYS})] if self.secret else []
        for variable, source in self.secret_env.items():
            secret, _, key = source.partition("/")
            named.append((secret, {key: variable}))
        return named

    def pod_labels(self, recipe_name: str, stage: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/part-of": "baton",
            "app.kubernetes.io/component": stage,
            "baton/recipe": recipe_name,
            **self.labels,
        }


MAX_PROCESSES = 64  # a machine has 16 accelerators at most; on CPUs more than this gain nothing


def _known(value: Any) -> Any:
    """Refuses `deepspeed` with the names of its stages."""
    if isinstance(value, str) and value.startswith("deepspeed"):
        raise ValueError(f"is {value!r}; DeepSpeed's stages are zero2 and zero3")
    return value


class Parallel(Section):
    """One run in several processes of each pod, each with its own accelerator; `parallel: fsdp` is short for its
    strategy. Rows of a step, schedule and logged losses are those of one process."""

    strategy: Annotated[Literal["ddp", "fsdp", "zero2", "zero3"], BeforeValidator(_known)] = "ddp"
    """`ddp` gives each process the whole model; `fsdp` (FSDP2) shards weights, gradients and optimizer over them, as
    does DeepSpeed's `zero3`; its `zero2` leaves the weights whole. The two need the package deepspeed."""
    offload: Literal["none", "cpu"] = "none"
    """With all but `ddp`: hold what is split in the host's memory while it is not computed with."""
    processes: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = "auto"
    """Processes of a pod; with `auto` one for each of `resources.gpus`, or one."""
    virtual_workers: Annotated[int, Field(ge=2, le=MAX_PROCESSES)] | None = None
    """Cut each step for so many workers, a power of two, whatever the number of processes that share them: those may be
    as many, fewer or one, and change between chunks, and the bits are the same. With `ddp` alone."""
    hang_after: Annotated[str, BeforeValidator(duration), WrittenAs("hang_timeout")] = "10m"
    """Time without a sign of life from all processes after which the stacks of all are logged and the chunk fails."""

    @field_validator("virtual_workers")
    @classmethod
    def _halves(cls, value: int | None) -> int | None:
        """Refuses a number that the tree of sums cannot halve down to one."""
        if value is not None and value & (value - 1):
            raise ValueError(f"is {value}; expected a power of two, such as {2 ** (value.bit_length() - 1)}")
        return value

    @property
    def hang_seconds(self) -> float:
        return seconds(self.hang_after)

    @property
    def is_sharded(self) -> bool:
        """Whether no process has the whole state."""
        return self.strategy != "ddp"

    @property
    def splits_weights(self) -> bool:
        """Whether no process has the whole model."""
        return self.strategy in ("fsdp", "zero3")

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed splits the state."""
        return self.strategy in ("zero2", "zero3")

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage: 2 splits optimizer and gradients, 3 weights too; 0 for none."""
        return int(self.strategy[-1]) if self.is_zero else 0
