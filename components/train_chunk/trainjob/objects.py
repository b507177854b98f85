"""Kubernetes objects as the API server has them: the fields that a stage writes or reads."""

from __future__ import annotations

from typing import TypedDict


class OwnerReference(TypedDict):
    """An object with which another one is deleted."""

    apiVersion: str
    kind: str
    name: str
    uid: str


class Metadata(TypedDict, total=False):
    """An object's name, labels and owners."""

    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    ownerReferences: list[OwnerReference]
    creationTimestamp: str
    deletionTimestamp: str


class Condition(TypedDict, total=False):
    """Something that holds of an object, or does not."""

    type: str
    status: str
    reason: str
    message: str


class ContainerState(TypedDict, total=False):
    """A container's state: waiting with its reason, or terminated."""

    waiting: Waiting
    terminated: Terminated


class Waiting(TypedDict, total=False):
    """Why a container does not run yet."""

    reason: str
    message: str


class Terminated(TypedDict, total=False):
    """A terminated container's exit code and reason."""

    exitCode: int
    reason: str
    finishedAt: str


class ContainerStatus(TypedDict, total=False):
    """A container's image and states."""

    image: str
    state: ContainerState
    lastState: ContainerState


class PodStatus(TypedDict, total=False):
    """A pod's phase, reason and containers."""

    phase: str
    reason: str
    message: str
    conditions: list[Condition]
    containerStatuses: list[ContainerStatus]


class PodSpec(TypedDict, total=False):
    """The node of a pod."""

    nodeName: str


class Pod(TypedDict):
    """A node of a job."""

    metadata: Metadata
    spec: PodSpec
    status: PodStatus


class InvolvedObject(TypedDict, total=False):
    """The object of an event."""

    name: str


class Warning(TypedDict, total=False):
    """An event of type Warning."""

    reason: str
    message: str
    involvedObject: InvolvedObject
    lastTimestamp: str
    eventTime: str


class JobStatus(TypedDict, total=False):
    """A job's conditions."""

    conditions: list[Condition]


class EnvironmentVariable(TypedDict, total=False):
    """A variable with a value, or with where it comes from."""

    name: str
    value: str
    valueFrom: dict[str, dict[str, str]]


class Trainer(TypedDict):
    """The processes of a job."""

    image: str
    command: list[str]
    args: list[str]
    env: list[EnvironmentVariable]
    numNodes: int
    numProcPerNode: int
    resourcesPerNode: dict[str, dict[str, str]]


class JobSpec(TypedDict, total=False):
    """A job's specification."""

    runtimeRef: dict[str, str]
    trainer: Trainer
    runtimePatches: list[dict[str, object]]
    activeDeadlineSeconds: int


class TrainJob(TypedDict, total=False):
    """A job of Kubeflow Trainer; what is created has no status yet."""

    apiVersion: str
    kind: str
    metadata: Metadata
    spec: JobSpec
    status: JobStatus
