"""The graph of a compiled pipeline as Mermaid text: what it shows is what the file says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.app import app
from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, write_package
from baton.recipe import load

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "pipelines/recipes/quickstart.yaml"
PIPELINES: dict[str, tuple[Path, list[str], Pipeline]] = {
    "4-chunks": (QUICKSTART, ["chunks.count=4"], Pipeline.finetune),
    "gate": (QUICKSTART, ['evaluation.gate={perplexity: "<= baseline"}'], Pipeline.finetune),
    "shards": (QUICKSTART, ["data.shards=3"], Pipeline.finetune),
    "phases": (ROOT / "tests/recipes/phases.yaml", [], Pipeline.finetune),
    "sweep": (ROOT / "pipelines/recipes/sweep.yaml", [], Pipeline.sweep),
    "100-chunks": (QUICKSTART, ["chunks.count=100"], Pipeline.finetune),
}
Groups = tuple[str, ...]
"""Labels of the groups that a box lies in."""


@pytest.fixture(scope="module", params=PIPELINES)
def document(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    recipe, settings, pipeline = PIPELINES[request.param]
    path = tmp_path_factory.mktemp("compiled") / f"{request.param}.yaml"
    write_package(pipeline_file.for_cluster(load.load(str(recipe), settings)), str(path), pipeline)
    return next(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def _tasks(
    document: Mapping[str, Any], dag: Mapping[str, Any], groups: Groups = ()
) -> Iterator[tuple[Groups, str, set[str]]]:
    """Yields of each task of the file its groups, its label, and the labels of what it waits for."""
    labels = {key: task["taskInfo"]["name"] for key, task in dag["tasks"].items()}
    for key, task in dag["tasks"].items():
        waits = {labels[other] for other in task.get("dependentTasks", [])}
        for source in task.get("inputs", {}).get("parameters", {}).values():
            waits |= (
                {labels[source["taskOutputParameter"]["producerTask"]]} if "taskOutputParameter" in source else set()
            )
        yield groups, labels[key], waits
        component = document["components"][task["componentRef"]["name"]]
        if "dag" in component:
            yield from _tasks(document, component["dag"], (*groups, labels[key]))


def _drawn(text: str) -> Iterator[tuple[Groups, str, set[str]]]:
    """Yields the same of each box and frame of a flowchart, whose ids must be unique."""
    head, *lines = text.splitlines()
    assert head == "flowchart TD"
    labels: dict[str, str] = {}
    boxes: list[tuple[Groups, str]] = []
    waits: dict[str, set[str]] = {}
    groups: list[str] = []
    for line in lines:
        if line.strip() == "end":
            groups.pop()
            continue
        if line.strip() == "direction TB":
            continue
        found = re.fullmatch(r' *(subgraph )?(?:([\w &]+) --> )?(\w+)(?:\["([^"]*)"\])?', line)
        assert found, line
        frame, sources, name, label = found.groups()
        if label is not None:
            assert name not in labels
            labels[name] = re.sub(r"#(\d+);", lambda mark: chr(int(mark[1])), label)
            boxes.append((tuple(groups), name))
        waits.setdefault(name, set()).update(sources.split(" & ") if sources else ())
        if frame:
            groups.append(labels[name])
    assert groups == []
    for inside, name in boxes:
        yield inside, labels[name], {labels[source] for source in waits[name]}


def test_every_task_and_what_it_waits_for_is_as_the_file_has_it(document: dict[str, Any]) -> None:
    text = pipeline_file.graph(document)
    assert text == pipeline_file.graph(document)
    said, drawn = ([(*groups, label, sorted(waits)) for groups, label, waits in found] for found in (
        _tasks(document, document["root"]["dag"]), _drawn(text)
    ))  # fmt: skip
    assert sorted(map(repr, drawn)) == sorted(map(repr, said))


def test_it_is_within_what_mermaid_draws_without_being_told_to(document: dict[str, Any]) -> None:
    text = pipeline_file.graph(document)
    assert len(text) <= 50_000, "its maxTextSize"
    assert sum(len(waits) for *_, waits in _drawn(text)) <= 500, "its maxEdges"


def test_marks_and_words_of_mermaid_are_text() -> None:
    task = {"taskInfo": {"name": '<b>"&#'}, "componentRef": {"name": "comp"}}
    spec = {"root": {"dag": {"tasks": {"end": task}}}, "components": {"comp": {}}}
    assert pipeline_file.graph(spec) == 'flowchart TD\n    End["#60;b#62;#34;#38;#35;"]\n'


def test_compile_writes_it(tmp_path: Path) -> None:
    package, graph = tmp_path / "pipeline.yaml", tmp_path / "graphs" / "graph.mmd"
    done = CliRunner().invoke(app, ["compile", str(QUICKSTART), "-o", str(package), "--graph", str(graph)])
    assert done.exit_code == 0, done.stderr
    assert 'Train_Chunk["train chunk 1"]' in graph.read_text()
    other = tmp_path / "other.yaml"
    refused = CliRunner().invoke(app, ["compile", str(QUICKSTART), "-o", str(other), "--graph", "a.svg"])
    assert refused.exit_code == 2
    assert "graph 'a.svg' does not end in .mmd." in refused.stderr
    assert "name the file FILE.mmd" in " ".join(refused.stderr.split())
    assert not other.exists()
