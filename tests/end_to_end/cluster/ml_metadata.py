"""What Kubeflow keeps of artifacts in ML Metadata: its driver records what a task takes, its launcher what it leaves.

As `backend/src/v2/metadata` of KFP 2.17 does it: an artifact has the title of its schema as its type, and its metadata
as custom properties, where every number is a double, a truth value an integer, and nothing may be null. Who takes an
artifact as input gets it as it is read back from here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kfp import dsl

from tests.end_to_end.cluster.graph import Task

Property = str | int | float | dict[str, Any]


@dataclass(frozen=True)
class Artifact:
    """An artifact: `type` is the title of its schema, such as `system.Dataset`."""

    id: int
    type: str
    uri: str
    custom_properties: dict[str, Property]


@dataclass
class Execution:
    """A task that was started."""

    id: int
    custom_properties: dict[str, Property]
    state: Literal["RUNNING", "COMPLETE", "FAILED"] = "RUNNING"
    type: str = "system.ContainerExecution"

    @property
    def name(self) -> str:
        return str(self.custom_properties["display_name"])


@dataclass(frozen=True)
class Event:
    """An execution has taken or made an artifact; `path` is what it calls it."""

    execution: Execution
    artifact: Artifact
    type: Literal["INPUT", "OUTPUT"]
    path: str


@dataclass
class MetadataStore:
    """The records of runs.

    Attributes:
        root: Address below which every artifact must lie: the run's pipeline root.
    """

    root: str
    artifacts: list[Artifact] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, task: Task) -> Execution:
        """Records a task that is started, and what it takes."""
        parameters = {name: value for name, value in task.arguments.items() if not isinstance(value, dsl.Artifact)}
        properties: dict[str, Property] = {"display_name": task.name, "inputs": parameters}
        with self.lock:  # tasks run side by side
            execution = Execution(len(self.executions) + 1, properties)
            self.executions.append(execution)
        for name, value in task.arguments.items():
            if isinstance(value, dsl.Artifact):
                self.events.append(Event(execution, self.artifacts[int(value.name) - 1], "INPUT", name))
        return execution

    def publish(self, execution: Execution, task: Task, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Records a task's end, and returns its outputs as later tasks are given them."""
        found = dict(outputs)
        for name, definition in task.component.output_definitions.artifacts.items():
            if name not in outputs:
                continue
            made = outputs[name]
            assert made.uri.startswith(f"{self.root}/"), f"{name}: {made.uri} is not below {self.root}"
            properties = {key: property_of(value) for key, value in made.metadata.items()}
            properties.setdefault("display_name", name)
            title = definition.artifact_type.schema_title
            with self.lock:
                artifact = Artifact(len(self.artifacts) + 1, title, made.uri, properties)
                self.artifacts.append(artifact)
            self.events.append(Event(execution, artifact, "OUTPUT", name))
            found[name] = type(made)(name=str(artifact.id), uri=artifact.uri, metadata=dict(properties))
        execution.custom_properties["outputs"] = {
            name: value for name, value in outputs.items() if not isinstance(value, dsl.Artifact)
        }
        execution.state = "COMPLETE"
        return found

    def maker(self, artifact: Artifact) -> Execution:
        """Returns which execution made an artifact."""
        (event,) = [event for event in self.events if event.artifact == artifact and event.type == "OUTPUT"]
        return event.execution

    def takers(self, artifact: Artifact) -> list[Execution]:
        """Returns the executions that took an artifact."""
        return [event.execution for event in self.events if event.artifact == artifact and event.type == "INPUT"]

    def artifact(self, execution: str, name: str) -> Artifact:
        """Returns what the execution of a name calls so and has made."""
        (event,) = [e for e in self.events if (e.execution.name, e.path, e.type) == (execution, name, "OUTPUT")]
        return event.artifact


def property_of(value: object) -> Property:
    """Returns a value of an artifact's metadata as the launcher stores it."""
    match value:
        case bool():
            return int(value)
        case int() | float() if math.isfinite(value):
            return float(value)
        case str():
            return value
        case list():
            return {"list": value}
        case dict():
            return {"struct": value}
    raise ValueError(f"unknown/unsupported value type: {value!r}")
