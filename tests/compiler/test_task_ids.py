"""Ids of tasks: Kubeflow's page finds tasks by them over all graphs, and fails where one repeats.

It fails while a task of the open graph has not run and a task of the same id has run in another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, write_package
from baton.kubeflow import run_status
from baton.recipe import load
from tests.gallery import recipes
from tests.goldens import test_golden

ROOT = Path(__file__).parents[2]
QUICKSTART, PHASES, SWEEP = test_golden.QUICKSTART, test_golden.PHASES, test_golden.SWEEP
EXAMPLES = [*recipes.PATHS, ROOT / "examples/phases.yaml", ROOT / "examples/grpo.yaml"]
LONG = "phases=[{name: one, training: {max_steps: 60}}, {name: two, training: {max_steps: 40}}]"
GATE = "evaluation={gate: {perplexity: '<= baseline'}, production: accepted}"
CASES: dict[str, test_golden.Source] = {
    **{f"golden {name}": source for name, source in test_golden.FILES.items()},
    **{path.stem: (path, (), Pipeline.finetune) for path in EXAMPLES},
    "sweep of the gallery": (recipes.GALLERY / "qwen3-sweep.yaml", (), Pipeline.sweep),
    "retraining of the gallery": (recipes.GALLERY / "smollm3-retrain.yaml", (), Pipeline.retrain),
    "20 chunks and 3 spare": (QUICKSTART, ("chunks.count=20", "chunks.spare=3"), Pipeline.finetune),
    "retraining in 20 chunks": (QUICKSTART, ("chunks.count=20", GATE), Pipeline.retrain),
    "phases in 20 chunks and shards": (PHASES, ("chunks.count=20", "data.shards=2", LONG), Pipeline.finetune),
    "gates in two phases": (PHASES, (GATE,), Pipeline.finetune),
    "retraining in phases": (PHASES, (GATE,), Pipeline.retrain),
    "brackets": (
        SWEEP,
        (
            "sweep.method=random",
            "sweep.trials=null",
            "sweep.halving=null",
            "sweep.hyperband={eta: 3}",
            "chunks.spare=2",
        ),
        Pipeline.sweep,
    ),
}
"""Every golden and every recipe of the gallery, and what combines graphs."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, made = tmp_path_factory.mktemp("ids"), {}

    def spec(name: str, document: int = 0) -> dict[str, Any]:
        if name not in made:
            path, settings, kind = CASES[name]
            target = folder / f"{len(made)}.yaml"
            write_package(pipeline_file.for_cluster(load.load(str(path), settings)), str(target), kind)
            made[name] = list(yaml.load_all(target.read_text(encoding="utf-8"), yaml.CSafeLoader))
        return made[name][document]

    return spec


def graphs(spec: dict[str, Any], component: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the tasks of the root, called so, and those of each graph below by the name that the page shows."""
    owner = spec["components"][component] if component else spec["root"]
    tasks = owner["dag"]["tasks"]
    if component is None:
        yield "root", tasks
    for task in tasks.values():
        inner = task["componentRef"]["name"]
        if "dag" in spec["components"][inner]:
            yield task["taskInfo"]["name"], spec["components"][inner]["dag"]["tasks"]
            yield from graphs(spec, inner)


@pytest.mark.parametrize("name", CASES)
def test_no_id_is_there_twice(name: str, compiled: Any) -> None:
    ids = Counter(key for _, tasks in graphs(compiled(name)) for key in tasks)
    assert [key for key, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("name", CASES)
def test_each_stage_is_known_by_its_component_and_number(name: str, compiled: Any) -> None:
    """The id of a chunk says which, and what reads runs tells each stage's component as the pods' labels have it."""
    spec = compiled(name)
    settings = compiled(name, 1)["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    places = list(run_status._tasks(spec))
    assert len(places) > 5
    assert len({stage.name for stage in places}) > len(places) / 2
    for stage in places:
        key = stage.key
        pod = settings[spec["components"][stage.component]["executorLabel"]]["podMetadata"]["labels"]
        assert stage.component_name == pod["app.kubernetes.io/component"]
        assert stage.component_name in key
        if stage.component_name == "train-chunk":
            number = re.search(r"chunk (\d+)$", stage.name)[1]  # type: ignore[index]
            assert re.search(rf"train-chunk{'' if number == '1' else f'-{number}'}(-again(-\d+)?)?$", key), key


def test_stages_of_phases_are_told_apart(compiled: Any) -> None:
    names = Counter(stage.name for stage in run_status._tasks(compiled("golden phases")))
    assert {"pretrain: data split", "sft: data split", "sft: report"} <= names.keys()
    assert max(names.values()) == 1


def test_names_on_the_page_stay(compiled: Any) -> None:
    shown = {task["taskInfo"]["name"] for _, tasks in graphs(compiled("golden 20-chunks")) for task in tasks.values()}
    numbered = {f"{kind} {number}" for kind in ("train chunk", "checkpoint") for number in range(1, 21)}
    others = {"data split", "tokenize", "evaluate", "export", "report", "chunks 1–8", "chunks 9–16", "chunks 17–20"}
    assert shown == numbered | others


def test_ids_begin_as_kubeflow_knows_them(compiled: Any) -> None:
    """It tells conditions, loops and exit handlers by how ids begin."""
    kinds = {"condition-branches": "condition-branches-", "condition": "condition-", "for-loop": "for-loop-"}
    for name in ("gates in two phases", "phases in 20 chunks and shards", "retraining in phases"):
        for _, tasks in graphs(compiled(name)):
            for key, task in tasks.items():
                kind = re.sub(r"^comp-|(-\d+)+$", "", task["componentRef"]["name"])
                assert key.startswith(kinds.get(kind, "")), key


def test_layers_that_cannot_be_opened_while_they_run_are_those_that_the_page_names(compiled: Any) -> None:
    """The iterations of a loop share ids: one of them opens once each of its tasks has begun."""
    page = (ROOT / "docs/internals/kubeflow.md").read_text(encoding="utf-8")
    several = set()
    for name in CASES:
        for _, tasks in graphs(compiled(name)):
            for task in tasks.values():
                inside = compiled(name)["components"][task["componentRef"]["name"]].get("dag", {}).get("tasks", {})
                if "parameterIterator" in task and len(inside) > 1:
                    several.add(re.sub(r" \d+$", "", task["taskInfo"]["name"]))
    assert several == {"data", "rung"}
    assert "an iteration of `data` or of a rung" in page
