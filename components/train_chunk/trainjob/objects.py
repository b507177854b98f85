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
    """What every object has."""

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
    """What a container waits for, or how it ended."""

    waiting: Waiting
    terminated: Terminated


class Waiting(TypedDict, total=False):
    """Why a container does not run yet."""

    reason: str
    message: str


class Terminated(TypedDict, total=False):
    """How a container ended."""

    exitCode: int
    reason: str
    finishedAt: str


class ContainerStatus(TypedDict, total=False):
    """How a container is doing."""

    image: str
    state: ContainerState
    lastState: ContainerState


class PodStatus(TypedDict, total=False):
    """How a pod is doing."""

    phase: str
    reason: str
    message: str
    conditions: list[Condition]
    containerStatuses: list[ContainerStatus]


class PodSpec(TypedDict, total=False):
    """Where a pod runs."""

    nodeName: str


class Pod(TypedDict):
    """A node of a job."""

    metadata: Metadata
    spec: PodSpec
    status: PodStatus


class InvolvedObject(TypedDict, total=False):
    """What an event is about."""

    name: str


class Warning(TypedDict, total=False):
    """An event of type Warning."""

    reason: str
    message: str
    involvedObject: InvolvedObject
    lastTimestamp: str
    eventTime: str


class JobStatus(TypedDict, total=False):
    """How a job is doing."""

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
    """What a job asks for."""

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
