"""Tasks of a compiled pipeline as processes of this machine, with what Kubeflow records of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kfp.local import executor_input_utils, executor_output_utils, placeholder_utils

from tests.end_to_end.cluster.graph import Task, TaskFailedError
from tests.end_to_end.cluster.ml_metadata import MetadataStore

ROOT = Path(__file__).parents[3]


class LocalTasks:
    """Runs tasks for `Graph.run`.

    Args:
        root: Folder below which artifacts go.

    Attributes:
        metadata: The records.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metadata = MetadataStore(str(root))

    def __call__(self, task: Task) -> dict[str, Any]:
        execution = self.metadata.begin(task)
        folder = self.root / re.sub("[^a-z0-9]+", "-", task.name.lower())
        folder.mkdir(parents=True)
        told = executor_input_utils.construct_executor_input(task.component, task.arguments, str(folder), False)
        command = placeholder_utils.replace_placeholders(
            full_command=[*task.container.command, *task.container.args],
            executor_input_dict=executor_input_utils.executor_input_to_dict(told, task.component),
            pipeline_resource_name="pipeline",
            task_resource_name=folder.name,
            pipeline_root=str(self.root),
            unique_pipeline_id="0000-1",
        )
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        env |= {entry.name: entry.value for entry in task.container.env}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            execution.state = "FAILED"
            raise TaskFailedError(task.name, done.stderr[-2000:])
        left = executor_output_utils.load_executor_output(told.outputs.output_file)
        outputs = executor_output_utils.get_outputs_from_executor_output(left, told, task.component)
        return self.metadata.publish(execution, task, outputs)
