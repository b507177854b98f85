"""Walks the graph of a compiled pipeline as the backend does: whatever is ready runs, side by side.

What a task is given and what comes out of it is worked out by `kfp.local`; only the order is our own, since the local
engine runs one task at a time. As in Argo, nothing new begins once a task has failed, and what runs ends first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2 as kubernetes_config
from kfp.local import io
from kfp.local.orchestrator import task_spec_utils
from kfp.local.orchestrator.enhanced_dag_orchestrator import ConditionEvaluator
from kfp.local.orchestrator.orchestrator_utils import OrchestratorUtils
from kfp.pipeline_spec import pipeline_spec_pb2 as ir


@dataclass(frozen=True)
class Task:
    """One task that is ready to run.

    Attributes:
        name: As the graph on the page shows it, such as `train chunk 2`.
        component: Its inputs and outputs.
        container: Image, command, environment and resources.
        config: What kfp-kubernetes sets for its pod.
        retry: How often it is started again.
        arguments: Values of its inputs.
    """

    name: str
    component: ir.ComponentSpec
    container: ir.PipelineDeploymentConfig.PipelineContainerSpec
    config: kubernetes_config.KubernetesExecutorConfig
    retry: ir.PipelineTaskSpec.RetryPolicy
    arguments: dict[str, Any]


class TaskFailedError(Exception):
    """A task has failed for good.

    Args:
        task: Its name.
        message: Why, in words.
    """

    def __init__(self, task: str, message: str) -> None:
        super().__init__(f"{task}: {message}")
        self.task, self.message = task, message


class Graph:
    """A compiled pipeline.

    Args:
        package: The compiled file, pipeline and platform part.
    """

    def __init__(self, package: Path) -> None:
        pipeline, *platforms = yaml.safe_load_all(package.read_text(encoding="utf-8"))
        self.spec = json_format.ParseDict(pipeline, ir.PipelineSpec())
        deployment = json_format.ParseDict(pipeline["deploymentSpec"], ir.PipelineDeploymentConfig())
        self.executors = dict(deployment.executors)
        # A pipeline that asks Kubernetes for nothing of its own has no second document.
        configs = platforms[0]["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if platforms else {}
        message = kubernetes_config.KubernetesExecutorConfig
        self.configs = {label: json_format.ParseDict(config, message()) for label, config in configs.items()}

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return str(self.spec.pipeline_info.name)

    def leave_out(self, *names: str) -> None:
        """Drops tasks of the outermost graph, on which no other may depend, and with them the pipeline's outputs."""
        for name in names:
            del self.spec.root.dag.tasks[name]
        self.spec.root.dag.ClearField("outputs")

    def run(self, arguments: dict[str, Any], execute: Callable[[Task], dict[str, Any]]) -> dict[str, Any]:
        """Runs every task and returns the pipeline's outputs.

        Args:
            arguments: Values of the pipeline's parameters; the others have their defaults.
            execute: Runs one task, in its own thread, and returns its outputs.

        Raises:
            TaskFailedError: the first task that failed.
        """
        return self._run_dag(self.spec.root, arguments, execute, None)

    def _run_dag(
        self, component: ir.ComponentSpec, arguments: dict[str, Any], execute: Callable, parent: io.IOStore | None
    ) -> dict[str, Any]:
        store = io.IOStore(parent=parent)
        given = OrchestratorUtils.join_user_inputs_and_defaults(arguments, component.input_definitions)
        for name, value in given.items():
            store.put_parent_input(name, value)
        waiting = dict(component.dag.tasks)
        done: set[str] = set()
        running: dict[Future, str] = {}
        failures: list[BaseException] = []
        with ThreadPoolExecutor(len(waiting)) as pool:
            while True:
                ready = [name for name, task in waiting.items() if done.issuperset(task.dependent_tasks)]
                for name in [] if failures else ready:
                    running[pool.submit(self._run_task, waiting.pop(name), name, execute, store)] = name
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future)
                    if error := future.exception():
                        failures.append(error)
                        continue
                    done.add(name)
                    for key, value in future.result().items():
                        store.put_task_output(name, key, value)
        if failures:
            raise failures[0]
        return OrchestratorUtils.get_dag_outputs(component.dag.outputs, store)

    def _run_task(self, task: ir.PipelineTaskSpec, name: str, execute: Callable, store: io.IOStore) -> dict[str, Any]:
        """Runs a task or a graph inside the graph, and returns no outputs where its condition does not hold."""
        condition = task.trigger_policy.condition
        if condition and not ConditionEvaluator.evaluate_condition(condition, store):
            return {}
        component = self.spec.components[task.component_ref.name]
        if component.WhichOneof("implementation") == "dag":
            arguments = task_spec_utils.build_nested_dag_arguments(name, task, component, store)
            return self._run_dag(component, arguments, execute, store)
        label = component.executor_label
        return execute(
            Task(
                name=task.task_info.name,
                component=component,
                container=self.executors[label].container,
                config=self.configs.get(label, kubernetes_config.KubernetesExecutorConfig()),
                retry=task.retry_policy,
                arguments=OrchestratorUtils.make_task_arguments(task.inputs, store),
            )
        )
