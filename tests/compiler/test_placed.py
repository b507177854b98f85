"""`resources.capacity: spot-first` in the compiled pipeline: each chunk's nodes are the choice of the previous one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.compiler.pipeline_file import write_package
from baton.source import prepare

RECIPE = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
PLACED = ["budget.by=2027-12-01T18:00Z", "resources.capacity=spot-first", "resources.node_selector={zone: a}"]
SPOT = {"zone": "a", "karpenter.sh/capacity-type": "spot"}


def compiled(tmp_path: Path, chunks: int, *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the pipeline and the settings of its executors on Kubernetes."""
    path = tmp_path / "p.yaml"
    write_package(prepare.load(RECIPE, list(overrides), store="s3://bucket/x", chunks=chunks).recipe, str(path))
    pipeline, platform = yaml.safe_load_all(path.read_text())
    return pipeline, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


@pytest.mark.parametrize("chunks", [1, 3, 9, 20])
def test_a_chunks_nodes_are_the_previous_ones_choice(tmp_path: Path, chunks: int) -> None:
    pipeline, executors = compiled(tmp_path, chunks, *PLACED)
    assert pipeline["root"]["inputDefinitions"]["parameters"]["nodes"]["defaultValue"] == SPOT
    parts = {"": pipeline["root"], **pipeline["components"]}
    seen = 0
    for part in parts.values():
        tasks = part.get("dag", {}).get("tasks", {})
        for name, task in tasks.items():
            if "nodes" not in task.get("inputs", {}).get("parameters", {}):
                continue
            given = task["inputs"]["parameters"]["nodes"]
            component = pipeline["components"][task["componentRef"]["name"]]
            if "executorLabel" in component:  # a chunk: where its pod goes is also among its inputs
                seen += 1
                selector = executors[component["executorLabel"]]["nodeSelector"]["nodeSelectorJson"]
                assert selector == given
                assert not task.get("cachingOptions", {}).get("enableCache")
            if produced := given.get("taskOutputParameter"):
                producer = tasks[produced["producerTask"]]["inputs"]["parameters"]
                assert "nodes" in producer, name
            else:
                assert given == {"componentInputParameter": "nodes"}
    assert seen == chunks


def test_other_capacities_have_no_such_parameter(tmp_path: Path) -> None:
    pipeline, executors = compiled(tmp_path, 9, "resources.capacity=spot", PLACED[2])
    assert "nodes" not in pipeline["root"]["inputDefinitions"]["parameters"]
    assert "train-chunk-placed" not in str(pipeline)
    assert executors["exec-train-chunk"]["nodeSelector"] == {"labels": {"zone": "a"}}
