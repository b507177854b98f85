"""The compiled pipeline as Kubeflow's page draws it: a picture of each of its layers, in one SVG.

On the page a layer is what lies in the root or in one sub-DAG: tasks, and below each the artifacts that it puts out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline_pb2

from baton.components.shared.core.errors import UserError
from baton.components.shared.pages import rendering
from baton.pipelines.compiling import layered
from baton.pipelines.compiling.conformance import LOADER
from baton.pipelines.compiling.layered import Edge

_MARGIN, _TITLE = 24, 44


class Kind(StrEnum):
    """What a node stands for."""

    task = "task"
    group = "group"
    artifact = "artifact"


BOXES = {Kind.task: (172, 44), Kind.artifact: (172, 44), Kind.group: (176, 72)}
"""Width and height of a node's box."""
CLOSER = (0.72, 0.9)
"""How much closer together than on the page boxes are, across and down, so that a picture in a document can be read."""
FONT_SIZE = 16
LABEL_ROOM = {Kind.task: 136, Kind.artifact: 136, Kind.group: 118}
"""Width of the label in a box."""


@dataclass(frozen=True)
class Node:
    """A box.

    Attributes:
        key: Its name in its layer: the task's, and with a dot that of its output.
        label: What is written on it.
        kind: What it stands for.
        opens: Component of the sub-DAG that it opens.
    """

    key: str
    label: str
    kind: Kind
    opens: str = ""

    @property
    def font_size(self) -> float:
        """Size of the letters with which the label fits, also in a wide font."""
        wide = sum(0.4 if letter in "fijlrt.:- " else 0.98 if letter in "mwMW" else 0.68 for letter in self.label)
        return min(FONT_SIZE, math.floor(10 * LABEL_ROOM[self.kind] / max(wide, 1)) / 10)


@dataclass(frozen=True)
class Layer:
    """The root or a sub-DAG.

    Attributes:
        path: Labels from the root to it.
        nodes: Its boxes.
        edges: Its arrows, between nodes' keys.
    """

    path: tuple[str, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def centres(self) -> dict[str, tuple[float, float]]:
        """Centre of each node, by its key."""
        places = layered.place([node.key for node in self.nodes], self.edges)
        return {key: (x * CLOSER[0], y * CLOSER[1]) for key, (x, y) in places.items()}

    def form(self) -> tuple[object, ...]:
        """Returns what layers have in common that differ in numbers alone."""
        ordered = sorted(self.nodes, key=lambda node: [_natural(part) for part in node.key.split(".")])
        at = {node.key: index for index, node in enumerate(ordered)}
        labels = tuple(re.sub(r"\d+", "#", node.label) for node in ordered)
        return labels, frozenset((at[source], at[target]) for source, target in self.edges)


@dataclass
class Panel:
    """A layer with its place in the picture, and those that look like it.

    Attributes:
        layer: What is drawn.
        centres: Centre of each node, from the panel's corner, by the node's key.
        width: Width, margins included.
        height: Height, margins and title included.
        alike: Layers that differ from it in numbers alone, and are not drawn.
        left: Where it is in the picture.
        top: The same.
    """

    layer: Layer
    centres: dict[str, tuple[float, float]]
    width: float
    height: float
    alike: list[Layer] = field(default_factory=list)
    left: float = 0
    top: float = 0

    @property
    def title(self) -> str:
        """What stands above it: its path, and which others look like it."""
        own = " › ".join(self.layer.path)
        names = [layer.path[-1] for layer in self.alike]
        if len(names) > 3:
            return f"{own}, and {len(names)} alike: {names[0]} … {names[-1]}"
        return f"{own}, and alike: {', '.join(names)}" if names else own

    def arrows(self) -> Iterator[tuple[float, float, float, float]]:
        """Yields where each edge begins and ends: below the middle of a box, above that of another."""
        kinds = {node.key: node.kind for node in self.layer.nodes}
        for source, target in self.layer.edges:
            (x1, y1), (x2, y2) = self.centres[source], self.centres[target]
            yield x1, y1 + BOXES[kinds[source]][1] / 2, x2, y2 - BOXES[kinds[target]][1] / 2


def write(package: str, path: str) -> None:
    """Writes the picture of a compiled file.

    Args:
        package: The compiled file.
        path: Where to write the SVG.

    Raises:
        UserError: the path has another ending.
    """
    check_ending(path)
    with open(package, encoding="utf-8") as file:
        spec = json_format.ParseDict(next(yaml.load_all(file, LOADER)), pipeline_pb2.PipelineSpec())
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(draw(spec), encoding="utf-8")


def check_ending(path: str) -> None:
    """Raises an error where a picture's path does not end in `.svg`."""
    if not path.endswith(".svg"):
        raise UserError(f"graph {path!r} has another ending than .svg.", remedy="The picture is an SVG.")


def draw(spec: pipeline_pb2.PipelineSpec) -> str:
    """Returns the picture of a pipeline as SVG: the root, then each sub-DAG, those that look alike once."""
    drawn = panels(layers(spec))
    width, height = _arrange(drawn)
    template = rendering.environment(Path(__file__).parent).get_template("graph.svg.j2")
    svg = template.render(
        name=spec.pipeline_info.name, panels=drawn, width=width, height=height, boxes=BOXES, font_size=FONT_SIZE
    )
    return "".join(line.strip() + "\n" for line in svg.splitlines() if line.strip())


def layers(spec: pipeline_pb2.PipelineSpec) -> list[Layer]:
    """Returns the root, and after it what its sub-DAGs and theirs hold."""
    found = [_layer(spec, ("root",), spec.root)]
    for layer in found:
        groups = [node for node in layer.nodes if node.kind is Kind.group]
        for node in sorted(groups, key=lambda node: layer.centres[node.key][::-1]):
            found.append(_layer(spec, (*layer.path, node.label), spec.components[node.opens]))
    return found


def _layer(spec: pipeline_pb2.PipelineSpec, path: tuple[str, ...], component: pipeline_pb2.ComponentSpec) -> Layer:
    """Returns the boxes and arrows of a DAG. An artifact that is handed in has no task in its key."""
    tasks: list[Node] = []
    artifacts = [Node(f".{name}", name, Kind.artifact) for name in sorted(component.input_definitions.artifacts)]
    puts_out: list[Edge] = []
    takes: list[Edge] = []
    for key, task in sorted(component.dag.tasks.items()):
        runs = spec.components[task.component_ref.name]
        is_group = runs.WhichOneof("implementation") == "dag"
        opens = task.component_ref.name if is_group else ""
        tasks.append(Node(key, task.task_info.name, Kind.group if is_group else Kind.task, opens))
        for name in sorted(runs.output_definitions.artifacts):
            artifacts.append(Node(f"{key}.{name}", _output_label(runs, name), Kind.artifact))
            puts_out.append((key, f"{key}.{name}"))
        takes.extend((source, key) for source in _sources(task))
    takes.sort(key=lambda edge: "." not in edge[0])
    return Layer(path, (*tasks, *artifacts), tuple(dict.fromkeys(puts_out + takes)))


def _output_label(component: pipeline_pb2.ComponentSpec, name: str) -> str:
    """Returns the name of an artifact, which for a sub-DAG is that of the only task within that may have made it."""
    selectors = component.dag.outputs.artifacts[name].artifact_selectors if component.dag.outputs.artifacts else []
    return selectors[0].output_artifact_key if len(selectors) == 1 else name


def _sources(task: pipeline_pb2.PipelineTaskSpec) -> Iterator[str]:
    """Yields what a task's arrows come from: tasks that it waits for or gets a parameter of, and artifacts."""
    for _, parameter in sorted(task.inputs.parameters.items()):
        if parameter.WhichOneof("kind") == "task_output_parameter":
            yield parameter.task_output_parameter.producer_task
    yield from task.dependent_tasks
    for _, artifact in sorted(task.inputs.artifacts.items()):
        if artifact.WhichOneof("kind") == "task_output_artifact":
            output = artifact.task_output_artifact
            yield f"{output.producer_task}.{output.output_artifact_key}"
        elif artifact.WhichOneof("kind") == "component_input_artifact":
            yield f".{artifact.component_input_artifact}"


def _natural(key: str) -> list[tuple[str, int]]:
    """Returns what sorts `train-chunk-10` after `train-chunk-9`."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", key)]


def panels(drawn: Sequence[Layer]) -> list[Panel]:
    """Returns the layers with their boxes placed, one for all that look alike."""
    by_form: dict[tuple[object, ...], Panel] = {}
    for layer in drawn:
        if same := by_form.get(layer.form()):
            same.alike.append(layer)
            continue
        centres = layer.centres
        half = BOXES[Kind.group][0] / 2 + _MARGIN
        left = min(x for x, _ in centres.values()) - half
        width = max(x for x, _ in centres.values()) + half - left
        top = _TITLE + _MARGIN + BOXES[Kind.group][1] / 2
        height = max(y for _, y in centres.values()) + top + BOXES[Kind.group][1] / 2 + _MARGIN
        moved = {key: (round(x - left, 1), round(y + top, 1)) for key, (x, y) in centres.items()}
        panel = Panel(layer, moved, round(width, 1), height)
        by_form[layer.form()] = panel
    return list(by_form.values())


def _arrange(drawn: Sequence[Panel]) -> tuple[float, float]:
    """Puts panels, with room for their titles, in rows no wider than the widest; returns width and height of all."""
    for panel in drawn:
        panel.width = max(panel.width, 2 * _MARGIN + 0.7 * FONT_SIZE * len(panel.title))
    widest = max(panel.width for panel in drawn)
    left = top = below = 0.0
    for panel in drawn:
        if left and left + panel.width > widest:
            left, top = 0.0, below
        panel.left, panel.top = left, top
        left += panel.width + _MARGIN
        below = max(below, top + panel.height + _MARGIN)
    return widest, below - _MARGIN
