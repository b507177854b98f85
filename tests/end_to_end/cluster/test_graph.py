"""What the pods of a compiled pipeline are, and in which order they would come: needs no cluster."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.compiler.pipeline_file import write_package
from baton.recipe import load

if TYPE_CHECKING:
    from tests.end_to_end.cluster.graph import Task

RECIPE = Path(__file__).parents[2] / "recipes/scratch.yaml"
SETTINGS = [
    "store=s3://bucket",
    "chunks.count=2",
    "evaluation.gate={perplexity: '<= baseline'}",
    "chunks.preemption={node_taints: [leaving]}",
    "resources.secret=store",
    "resources.memory=1Gi",
    "resources.gpus=1",
    "resources.node_selector={pool: spot}",
    "resources.tolerations=[{key: spot, effect: NoSchedule}]",
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "pipeline.yaml"
    write_package(load.load(str(RECIPE), SETTINGS), str(path))
    return path


@pytest.mark.parametrize(("verdict", "last"), [("accepted", "export"), ("rejected", "rejected")])
def test_ready_tasks_run_side_by_side_and_one_branch_is_taken(package: Path, verdict: str, last: str) -> None:
    from tests.end_to_end.cluster.graph import Graph

    begun: list[str] = []
    beside = threading.Barrier(2, timeout=20)

    def execute(task: Task) -> dict[str, Any]:
        begun.append(task.name)
        if task.name in ("checkpoint 1", "train chunk 2"):
            beside.wait()  # breaks where the one waits for the other's end
        return dict.fromkeys(
            task.component.output_definitions.parameters, verdict if task.name == "gate" else task.name
        )

    outputs = Graph(package).run({"run_name": "r"}, execute)
    assert outputs == {"Output": last}
    assert begun[:3] == ["data split", "tokenize", "train chunk 1"]
    assert set(begun) == {
        *("data split", "tokenize", "train chunk 1", "checkpoint 1", "train chunk 2", "checkpoint 2"),
        *("evaluate", "gate", last, "report"),
    }


def test_nothing_begins_behind_a_failure_and_what_runs_goes_on(package: Path) -> None:
    from tests.end_to_end.cluster.graph import Graph, TaskFailedError

    ended: list[str] = []
    failed = threading.Event()

    def execute(task: Task) -> dict[str, Any]:
        if task.name == "train chunk 2":
            failed.set()
            raise TaskFailedError(task.name, "OOMKilled (exit code 137)")
        if task.name == "checkpoint 1":
            assert failed.wait(20)
        ended.append(task.name)
        return dict.fromkeys(task.component.output_definitions.parameters, task.name)

    with pytest.raises(TaskFailedError, match=r"^train chunk 2: OOMKilled \(exit code 137\)$"):
        Graph(package).run({"run_name": "r"}, execute)
    assert ended == ["data split", "tokenize", "train chunk 1", "checkpoint 1"]


def test_the_pod_of_a_chunk_is_what_the_recipe_asks_for(package: Path) -> None:
    from tests.end_to_end.cluster import pod_manifest
    from tests.end_to_end.cluster.graph import Graph

    pods = {}

    def execute(task: Task) -> dict[str, Any]:
        place = pod_manifest.Place("id", "s3://bucket/artifacts", "baton-runner", "launcher", False)
        told = pod_manifest.executor_input(task, place, f"{place.root}/{task.name}")
        pods[task.name] = pod_manifest.manifest(task, told, "pod", place.root, place)
        return dict.fromkeys(task.component.output_definitions.parameters, "s3://bucket/runs/r")

    Graph(package).run({"run_name": "r"}, execute)
    spec = pods["train chunk 2"]["spec"]
    (main,) = spec["containers"]
    env = {entry["name"]: entry.get("valueFrom", entry.get("value")) for entry in main["env"]}
    assert env["AWS_SECRET_ACCESS_KEY"] == {"secretKeyRef": {"name": "store", "key": "AWS_SECRET_ACCESS_KEY"}}
    assert env["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert main["resources"]["limits"] == {"memory": "1Gi", "nvidia.com/gpu": "1"}
    assert spec["nodeSelector"] == {"pool": "spot"}
    assert spec["tolerations"] == [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in spec["volumes"]
    told = main["args"][main["args"].index("--executor_input") + 1]
    assert '"index": 2' in told
    assert "nvidia.com/gpu" not in str(pods["checkpoint 2"])
