"""What Baton reads of the answers of the Kubeflow Pipelines API, and of the Argo workflow of a run."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol, TypedDict


class Installation(TypedDict, total=False):
    """What an installation's health check tells."""

    tag_name: str
    multi_user: bool


class Status(Protocol):
    """Reason why something ended as it did."""

    message: str | None


class ChildTask(Protocol):
    """Node after another one: the API calls its id the name of a pod."""

    pod_name: str | None


class TaskDetail(Protocol):
    """State of a node of the workflow, as the API names it."""

    display_name: str | None
    child_tasks: Sequence[ChildTask] | None
    state: str | None
    start_time: datetime.datetime | None
    end_time: datetime.datetime | None
    error: Status | None


class RunDetails(Protocol):
    """States of a run's nodes."""

    task_details: Sequence[TaskDetail] | None


class ComponentRef(TypedDict, total=False):
    """Component that a task runs, by its name."""

    name: str


class TaskInfo(TypedDict, total=False):
    """Name of a task on the page."""

    name: str


class Task(TypedDict, total=False):
    """Task of a compiled pipeline."""

    taskInfo: TaskInfo
    componentRef: ComponentRef
    dependentTasks: list[str]


class Dag(TypedDict, total=False):
    """Graph of tasks, by their keys."""

    tasks: dict[str, Task]


class Parameter(TypedDict, total=False):
    """Parameter of a compiled pipeline."""

    defaultValue: object
    parameterType: str


class Inputs(TypedDict, total=False):
    """Inputs of a compiled pipeline."""

    parameters: dict[str, Parameter]


class Component(TypedDict, total=False):
    """Component of a compiled pipeline; one that is a graph itself has a `dag`."""

    dag: Dag
    inputDefinitions: Inputs


class PipelineInfo(TypedDict, total=False):
    """Name of a compiled pipeline."""

    name: str


class PipelineSpec(TypedDict, total=False):
    """The compiled pipeline."""

    root: Component
    components: dict[str, Component]
    pipelineInfo: PipelineInfo


class PostedSpec(PipelineSpec, total=False):
    """The compiled pipeline as it was posted: alone, or beside its platform's."""

    pipeline_spec: PipelineSpec


class RuntimeConfig(Protocol):
    """What a run was started with."""

    parameters: dict[str, object] | None


class VersionReference(Protocol):
    """Version of an uploaded pipeline."""

    pipeline_id: str
    pipeline_version_id: str


class Pipeline(Protocol):
    """A registered pipeline."""

    pipeline_id: str


class PipelineVersion(Protocol):
    """A version of a registered pipeline."""

    pipeline_version_id: str
    pipeline_spec: PostedSpec | None


class Run(Protocol):
    """A run, as `kfp.Client.get_run` returns it."""

    run_id: str
    display_name: str
    state: str | None
    service_account: str | None
    created_at: datetime.datetime
    finished_at: datetime.datetime | None
    pipeline_spec: PostedSpec | None
    pipeline_version_reference: VersionReference | None
    runtime_config: RuntimeConfig | None
    run_details: RunDetails | None


class CronSchedule(Protocol):
    """Schedule of a recurring run."""

    cron: str


class Trigger(Protocol):
    """Trigger of a recurring run."""

    cron_schedule: CronSchedule | None


class RecurringRun(Protocol):
    """A recurring run, as `kfp.Client.list_recurring_runs` returns it."""

    recurring_run_id: str
    display_name: str
    description: str | None
    status: str
    trigger: Trigger | None


class Node(TypedDict, total=False):
    """Node of an Argo workflow."""

    id: str
    name: str
    displayName: str
    type: str
    phase: str
    message: str
    startedAt: str
    templateName: str


class Metadata(TypedDict, total=False):
    """Name and annotations of a Kubernetes object."""

    name: str
    annotations: dict[str, str]


class RetryStrategy(TypedDict, total=False):
    """When Argo starts a node again."""

    limit: str
    retryPolicy: str
    expression: str


class TemplateDefaults(TypedDict, total=False):
    """What an installation merges into every template."""

    retryStrategy: RetryStrategy


class WorkflowSpec(TypedDict, total=False):
    """Specification of a workflow."""

    activeDeadlineSeconds: int
    templateDefaults: TemplateDefaults


class WorkflowStatus(TypedDict, total=False):
    """Progress of a workflow."""

    message: str
    nodes: dict[str, Node]
    compressedNodes: str


class Workflow(TypedDict, total=False):
    """The Argo workflow of a run."""

    metadata: Metadata
    spec: WorkflowSpec
    status: WorkflowStatus
