"""The picture of a compiled pipeline: what it shows is what the file says, and it can be read."""

from __future__ import annotations

import graphlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2 as pipeline_pb2
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from typer.testing import CliRunner

from baton.components.shared.recipe import recipe_file
from baton.pipelines.cli.app import app
from baton.pipelines.compiling import for_pods, graph, layered
from baton.pipelines.compiling.graph import Kind
from baton.pipelines.compiling.package import Pipeline, write_package

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "pipelines/recipes/quickstart.yaml"
PIPELINES: dict[str, tuple[Path, list[str], Pipeline]] = {
    "4-chunks": (QUICKSTART, ["chunks.count=4"], Pipeline.finetune),
    "gate": (QUICKSTART, ['evaluation.gate={perplexity: "<= baseline"}'], Pipeline.finetune),
    "phases": (ROOT / "tests/recipes/phases.yaml", [], Pipeline.finetune),
    "sweep": (ROOT / "pipelines/recipes/sweep.yaml", [], Pipeline.sweep),
    "100-chunks": (QUICKSTART, ["chunks.count=100"], Pipeline.finetune),
}
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Box:
    """A node as it is drawn."""

    label: str
    kind: str
    x: float
    y: float

    @property
    def sides(self) -> tuple[float, float, float, float]:
        width, height = graph.BOXES[Kind(self.kind)]
        return self.x - width / 2, self.y - height / 2, self.x + width / 2, self.y + height / 2


@dataclass(frozen=True)
class Drawn:
    """A panel as it is drawn."""

    title: str
    sides: tuple[float, float, float, float]
    boxes: list[Box]
    arrows: list[tuple[Box, Box]]
    sizes: list[float]


@pytest.fixture(scope="module", params=PIPELINES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe, settings, pipeline = PIPELINES[request.param]
    path = tmp_path_factory.mktemp("compiled") / f"{request.param}.yaml"
    write_package(for_pods.settled(recipe_file.load(str(recipe), settings)), str(path), pipeline)
    return path


@pytest.fixture(scope="module")
def document(compiled: Path) -> dict[str, Any]:
    return next(yaml.load_all(compiled.read_text(), yaml.CSafeLoader))


@pytest.fixture(scope="module")
def spec(document: dict[str, Any]) -> pipeline_pb2.PipelineSpec:
    return json_format.ParseDict(document, pipeline_pb2.PipelineSpec())


@pytest.fixture(scope="module")
def panels(spec: pipeline_pb2.PipelineSpec) -> list[Drawn]:
    return list(_read(graph.draw(spec)))


def _read(svg: str) -> Iterator[Drawn]:
    for panel in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if panel.get("class") != "panel":
            continue
        left, top = _numbers(panel.get("transform"))
        page = panel.find(f"{SVG}rect")
        assert page is not None
        boxes, sizes = [], []
        for group in panel.findall(f"{SVG}g"):
            use, text = group.find(f"{SVG}use"), group.find(f"{SVG}text")
            assert use is not None
            assert text is not None
            boxes.append(Box(text.text or "", (use.get("href") or "")[1:], *_numbers(group.get("transform"))))
            sizes.append(_numbers(text.get("style"))[0] if text.get("style") else graph.FONT_SIZE)
        tops = {(box.x, box.sides[1]): box for box in boxes}
        bottoms = {(box.x, box.sides[3]): box for box in boxes}
        arrows = []
        for path in panel.findall(f"{SVG}path"):
            x1, y1, *_, x2, y2 = _numbers(path.get("d"))
            arrows.append((bottoms[x1, y1], tops[x2, y2]))
        title = panel.findtext(f"{SVG}text") or ""
        width, height = float(page.get("width") or 0), float(page.get("height") or 0)
        yield Drawn(title, (left, top, left + width, top + height), boxes, arrows, sizes)


def _numbers(text: str | None) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text or "")]


def _said(document: Mapping[str, Any], dag: Mapping[str, Any]) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Returns the labels of a DAG's nodes, and the arrows between them, as the file has them."""
    tasks = dag["tasks"]
    labels = {key: task["taskInfo"]["name"] for key, task in tasks.items()}
    nodes, arrows = Counter(labels.values()), set()
    for key, task in tasks.items():
        outputs = document["components"][task["componentRef"]["name"]].get("outputDefinitions", {})
        for artifact in outputs.get("artifacts", {}):
            nodes[artifact] += 1
            arrows.add((key, f"{key}.{artifact}", labels[key], artifact))
        inputs = task.get("inputs", {})
        before = set(task.get("dependentTasks", []))
        for source in inputs.get("parameters", {}).values():
            before |= {source["taskOutputParameter"]["producerTask"]} if "taskOutputParameter" in source else set()
        arrows |= {(other, key, labels[other], labels[key]) for other in before}
        for source in inputs.get("artifacts", {}).values():
            made = source["taskOutputArtifact"]
            name = made["outputArtifactKey"]
            arrows.add((f"{made['producerTask']}.{name}", key, name, labels[key]))
    return nodes, Counter((source, target) for *_, source, target in arrows)


def _dags(document: Mapping[str, Any], path: str, dag: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the root and each sub-DAG by the names on the way there."""
    yield path, dag
    for task in dag["tasks"].values():
        component = document["components"][task["componentRef"]["name"]]
        if "dag" in component:
            yield from _dags(document, f"{path} › {task['taskInfo']['name']}", component["dag"])


def test_every_layer_is_drawn_as_the_file_has_it(
    document: dict[str, Any], spec: pipeline_pb2.PipelineSpec, panels: list[Drawn]
) -> None:
    dags = dict(_dags(document, "root", document["root"]["dag"]))
    drawn = {panel.title.split(", and ")[0]: panel for panel in panels}
    assert len(drawn) == len(panels)
    for path, panel in drawn.items():
        nodes, arrows = _said(document, dags.pop(path))
        assert Counter(box.label for box in panel.boxes) == nodes, path
        assert Counter((source.label, target.label) for source, target in panel.arrows) == arrows, path
    made = {" › ".join(panel.layer.path): panel for panel in graph.panels(graph.layers(spec))}
    assert list(made) == list(drawn)
    shown = {" › ".join(layer.path): panel.layer for panel in made.values() for layer in panel.alike}
    assert shown.keys() == dags.keys()
    for path, same in shown.items():
        nodes, arrows = _said(document, dags[path])
        assert Counter(re.sub(r"\d+", "", node) for node in nodes.elements()) == Counter(
            re.sub(r"\d+", "", node.label) for node in same.nodes
        )
        assert arrows.total() == len(same.edges)


def test_it_can_be_read(panels: list[Drawn]) -> None:
    for panel in panels:
        assert all(target.sides[1] > source.sides[3] for source, target in panel.arrows)
        assert not [pair for pair in combinations(panel.boxes, 2) if _overlap(pair[0].sides, pair[1].sides)]
        width, height = panel.sides[2] - panel.sides[0], panel.sides[3] - panel.sides[1]
        for box, size in zip(panel.boxes, panel.sizes, strict=True):
            left, top, right, bottom = box.sides
            assert left > 0
            assert top > 36, "below the title"
            assert right < width
            assert bottom < height
            assert _width(box.label, size) < graph.LABEL_ROOM[Kind(box.kind)], box.label
        assert _width(panel.title, graph.FONT_SIZE, "bold") < width - 48
    assert not [pair for pair in combinations(panels, 2) if _overlap(pair[0].sides, pair[1].sides)]


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _width(text: str, size: float, weight: str = "normal") -> float:
    """Returns how wide a text is in a wide font."""
    font = FontProperties(family="DejaVu Sans", weight=weight)
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width)


def test_the_picture_is_small_and_the_same_each_time(spec: pipeline_pb2.PipelineSpec) -> None:
    svg = graph.draw(spec)
    assert svg == graph.draw(spec)
    assert len(svg.encode()) < 100_000


def test_layers_that_differ_in_more_than_numbers_are_drawn_each() -> None:
    def layer(*names: str, edges: tuple[tuple[str, str], ...] = ()) -> graph.Layer:
        return graph.Layer(("root",), tuple(graph.Node(name, name, Kind.task) for name in names), edges)

    linked, bare = layer("chunk 1", "chunk 2", edges=(("chunk 1", "chunk 2"),)), layer("chunk 1", "chunk 2")
    later = layer("chunk 3", "chunk 4", edges=(("chunk 3", "chunk 4"),))
    assert [panel.alike for panel in graph.panels([linked, later, bare, layer("chunk 1", "gate 2")])] == [
        [later],
        [],
        [],
    ]


DAGRE = json.loads((ROOT / "tests/assets/dagre-0.8.5.json").read_text())
"""Graphs, and where dagre 0.8.5, as it is in Kubeflow's page, puts their nodes: layers of pipelines that are or were
compiled here, and random ones. Nodes are numbered."""


@pytest.mark.parametrize("case", DAGRE, ids=lambda case: case["name"])
def test_boxes_are_where_the_page_puts_them(case: dict[str, Any]) -> None:
    nodes = [str(-number) for number in range(len(case["places"]))]
    places = layered.place(nodes, [(nodes[source], nodes[target]) for source, target in case["edges"]])
    (x, y), (left, top) = places[nodes[0]], case["places"][0]
    moved = [(px - x + left, py - y + top) for px, py in places.values()]
    assert moved == [pytest.approx(place, abs=0.01) for place in case["places"]]


def test_a_graph_that_leads_back_to_its_start_has_no_layout() -> None:
    with pytest.raises(graphlib.CycleError):
        layered.place("ab", [("a", "b"), ("b", "a")])


def test_a_name_is_written_as_text(tmp_path: Path) -> None:
    spec = pipeline_pb2.PipelineSpec()
    spec.root.dag.tasks["one"].task_info.name = "<b>&"
    assert "&lt;b&gt;&amp;</text>" in graph.draw(spec)


def test_compile_writes_it(tmp_path: Path) -> None:
    package, picture = tmp_path / "pipeline.yaml", tmp_path / "pictures" / "graph.svg"
    done = CliRunner().invoke(app, ["compile", str(QUICKSTART), "-o", str(package), "--graph", str(picture)])
    assert done.exit_code == 0, done.stderr
    assert "train chunk 1</text>" in picture.read_text()
    refused = CliRunner().invoke(
        app, ["compile", str(QUICKSTART), "-o", str(tmp_path / "other.yaml"), "--graph", "a.png"]
    )
    assert refused.exit_code == 2
    assert "has another ending than .svg" in refused.stderr
    assert not (tmp_path / "other.yaml").exists()
