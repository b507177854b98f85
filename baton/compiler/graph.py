"""The compiled pipeline as Mermaid text: a box for each stage, a frame for each group, and arrows to what waits."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline_pb2

from baton.compiler.conformance import LOADER
from baton.errors import UserError

ENDING = ".mmd"


def write(package: str, path: str) -> None:
    """Writes the graph of a compiled file.

    Args:
        package: The compiled file.
        path: Where to write the text.

    Raises:
        UserError: the path has another ending.
    """
    check_ending(path)
    with open(package, encoding="utf-8") as file:
        spec = json_format.ParseDict(next(yaml.load_all(file, LOADER)), pipeline_pb2.PipelineSpec())
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(graph(spec), encoding="utf-8")


def check_ending(path: str) -> None:
    """Raises an error where a graph's path does not end in `.mmd`."""
    if not path.endswith(ENDING):
        raise UserError(
            f"graph {path!r} has another ending than {ENDING}.",
            remedy=f"The graph is Mermaid text: name the file FILE{ENDING}.",
        )


def graph(spec: pipeline_pb2.PipelineSpec) -> str:
    """Returns the flowchart of a pipeline, in the order of its stages; what a loop repeats is in it once."""
    return "\n".join(["flowchart TD", *_drawn(spec, spec.root.dag, "    ")]) + "\n"


def _drawn(spec: pipeline_pb2.PipelineSpec, dag: pipeline_pb2.DagSpec, indent: str) -> Iterator[str]:
    waits = {key: sorted(task.dependent_tasks) for key, task in sorted(dag.tasks.items())}
    for key in graphlib.TopologicalSorter(waits).static_order():
        task = dag.tasks[key]
        runs = spec.components[task.component_ref.name]
        box = f'{_id(key)}["{_escaped(task.task_info.name)}"]'
        arrow = f"{' & '.join(map(_id, waits[key]))} --> " if waits[key] else ""
        if runs.WhichOneof("implementation") == "dag":
            yield f"{indent}subgraph {box}"
            yield f"{indent}    direction TB"
            yield from _drawn(spec, runs.dag, f"{indent}    ")
            yield f"{indent}end"
            if arrow:
                yield f"{indent}{arrow}{_id(key)}"
        else:
            yield f"{indent}{arrow}{box}"


def _id(task: str) -> str:
    """Returns the id of a box, with capitals, as Mermaid keeps words such as `end` and `style` for itself."""
    return re.sub(r"\W", "_", task.title())


def _escaped(label: str) -> str:
    """Returns a label whose marks are text."""
    return re.sub(r"[^\w ,.:()/–-]", lambda mark: f"#{ord(mark[0])};", label)
