"""Recipe sections `resources` and `training.parallel`: the pods of a run, and several processes in each."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, field_validator, model_validator

from baton.machine import PROMISED_GPUS
from baton.recipe.base import Quantity, Section, WrittenAs, duration, seconds

MAX_NODES = 512  # a chunk's pod polls the logs and states of all its job's pods every few seconds

# Keys of the store's Secret, and environment variables of the same names.
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class Toleration(Section):
    """A Kubernetes toleration of pods that run the model."""

    key: str | None = None
    """Taint key; default: every taint."""
    operator: Literal["Equal", "Exists"] = "Exists"
    """Comparison of the key."""
    value: str | None = None
    """Taint value, with `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Tolerated effect; default: all."""


NodeCount = Annotated[int, Field(ge=1, le=MAX_NODES)]


class Nodes(Section):
    """A varying number of pods. A chunk starts with the most, and takes fewer where the cluster has no room. Pods ×
    processes must divide `training.parallel.virtual_workers`."""

    min: NodeCount = 1
    """Fewest pods of a chunk."""
    max: NodeCount
    """Most pods of a chunk."""
    patience: Annotated[str, BeforeValidator(duration)] = "5m"
    """Time to wait for room or quota before the next smaller number; with the smallest, `wait_for_nodes` applies."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max {self.max}; expected a min no larger than max")
        return self


_COUNT, _RANGE = TypeAdapter[int](NodeCount), TypeAdapter(Nodes)


class Resources(Section):
    """Requests of the pods. Accelerators, memory, nodes and tolerations apply to pods that run the model (train-chunk,
    evaluate)."""

    profile: Literal["cpu", "mps", "cuda-small", "cuda-large", "auto"] | None = None
    """Kind of machine: sets precision, optimizer, attention, workers and pod requests where the recipe omits them;
    `baton check` prints the choice. `cuda-small`: a GPU up to 24 GB; `auto`: this machine, for local runs."""
    image: str = "baton-python:0.1.0"
    """Container image with Baton."""
    accelerator: str = "nvidia.com/gpu"
    """Resource name of the accelerator."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Accelerators per pod that runs the model; 0: CPU."""
    nodes: NodeCount | Nodes = 1
    """Pods that train a chunk together, each with `gpus` accelerators. `{min: 1, max: 4}` takes as many as the cluster
    has. Several need Kubeflow Trainer 2.2 or newer."""
    runtime: Annotated[str, Field(pattern=r"^(cluster/)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")] = "baton"
    """With `nodes`: a `TrainingRuntime` of the namespace, as in `k8s/components/trainer`. `cluster/NAME`: a
    `ClusterTrainingRuntime`, such as `cluster/torch-distributed`."""
    wait_for_nodes: Annotated[str, BeforeValidator(duration)] = "1h"
    """With `nodes`: time until all pods must run; then the chunk fails with the reason."""
    gpu_memory: Quantity | None = None
    """Memory of one accelerator, for the estimate of `baton check`; default: from `node_selector` or this machine, if
    known."""
    cpu: Quantity | None = None
    """CPU request and limit of a pod that runs the model."""
    memory: Quantity | None = None
    """Memory request and limit of a pod that runs the model."""
    shm: Quantity | None = "2Gi"
    """Size of `/dev/shm` in a pod that runs the model; counts as its memory."""
    node_selector: dict[str, str] = {}
    """Node labels for pods that run the model."""
    tolerations: list[Toleration] = []
    """Tolerated taints; spot nodes usually have one."""
    labels: dict[str, str] = {}
    """Labels on every pod."""
    capacity: Literal["spot", "on-demand", "spot-first"] | None = None
    """Label `baton/capacity` of pods that run the model; a cluster policy can map it to a priority class. With
    `spot-first` each train-chunk takes spot nodes while the time until `budget.by` allows it, else on-demand ones."""
    spot_nodes: dict[str, str] = {"karpenter.sh/capacity-type": "spot"}
    """Labels of spot nodes, for `capacity: spot-first`; the default is Karpenter's."""
    on_demand_nodes: dict[str, str] = {"karpenter.sh/capacity-type": "on-demand"}
    """Labels of on-demand nodes, for `capacity: spot-first`."""
    interruptions_per_day: Annotated[float, Field(ge=0)] | None = None
    """Preemptions of a pod to expect, for the forecast of `baton check`. Default: the rate of an earlier run."""
    secret: str | None = None
    """Secret with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, in every pod's environment."""
    secret_env: dict[str, Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[-._a-zA-Z0-9]+$")]] = {}
    """Further credentials of every pod: variable → `secret/key`, such as `{HF_TOKEN: hub/token}` for private models and
    `export.hub`."""
    image_pull_secret: str | None = None
    """Secret for a private registry."""
    cache_claim: str | None = None
    """PersistentVolumeClaim mounted at `store.cache_dir` in pods that run the model."""
    env: dict[str, str] = {}
    """Plain environment of every pod, such as `AWS_ENDPOINT_URL`. Never credentials."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Restarts of a pod of data split, tokenize, learning-rate finder, train-chunk, evaluate or export; each
    train-chunk pod has `chunks.retries`. Kubeflow Pipelines 2.17 restarts deleted pods, not failed ones; plain Argo
    does the opposite. `chunks.extra` and a second submission help in both."""
    deadline: Annotated[str, BeforeValidator(duration)] | None = None
    """Time limit of the whole run, such as `72h`; Kubeflow then ends it."""
    keep_pods: Annotated[str, BeforeValidator(duration)] | None = None
    """Time to keep pods and logs of a finished run, such as `48h`; default: the cluster's."""
    run_as_non_root: bool = True
    """Refuse images that run as root; the namespace policy `restricted` requires it."""

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
    def is_placed(self) -> bool:
        """Whether each train-chunk is told which nodes to run on."""
        return self.capacity == "spot-first"

    def nodes_of(self, capacity: str) -> dict[str, str]:
        """Returns the node labels of a train-chunk by its capacity, `spot` or `on-demand`."""
        return self.node_selector | (self.spot_nodes if capacity == "spot" else self.on_demand_nodes)

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
    """Several processes per pod, each with its own accelerator; `parallel: fsdp` sets the strategy. Batch and schedule
    equal those of one process."""

    strategy: Annotated[Literal["ddp", "fsdp", "zero2", "zero3"], BeforeValidator(_known)] = "ddp"
    """`ddp`: the whole model in each process. `fsdp` (FSDP2) and `zero3`: weights, gradients and optimizer sharded;
    `zero2`: weights whole. `zero2` and `zero3` need the package deepspeed."""
    offload: Literal["none", "cpu"] = "none"
    """Hold shards in host memory between uses; not with `ddp`."""
    processes: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = "auto"
    """Processes per pod; `auto`: one for each of `resources.gpus`, at least one."""
    virtual_workers: Annotated[int, Field(ge=2, le=MAX_PROCESSES)] | None = None
    """Parts of each step, a power of two. The processes that share them may vary, with bit-identical results. With
    `ddp` alone."""
    hang_after: Annotated[str, BeforeValidator(duration), WrittenAs("hang_timeout")] = "10m"
    """Time without progress in all processes; then their stacks are logged and the chunk fails."""

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
