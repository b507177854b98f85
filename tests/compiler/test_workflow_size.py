"""The predicted size of a workflow, against workflows that Kubeflow Pipelines 2.17 made and ran.

`tests/assets/workflow-sizes` holds of each run the documents that it was started with and what was measured: bytes of
the workflow's specification and of its nodes, of `status.compressedNodes` where Argo compressed them, and of the nodes
of each stage that ran from beginning to end (so of none that came from the cache or had not begun).
"""

from __future__ import annotations

import gzip
import json
import random
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, packaged, write_package
from baton.compiler.workflow_size import MARGIN, MAX_WORKFLOW_BYTES, WorkflowSize, predict
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe

ASSETS = Path(__file__).parents[1] / "assets/workflow-sizes"
RECIPE = Path(__file__).parents[1] / "recipes/scratch.yaml"
QUICKSTART = Path(__file__).parents[2] / "pipelines/recipes/quickstart.yaml"
MLFLOW = {
    "MLFLOW_RUN_ID": "6a951f6a72c445ed82864a0ad844b924",
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000",
    "MLFLOW_EXPERIMENT_ID": "1",
}
"""Variables that Kubeflow's own MLflow adds to each pod, so that no compiled file has them."""
LOOPS = {"sweep-record-frozen": {"data": 1, "rung 1": 3, "rung 2": 1}}

TABLE = [
    # run, specification, nodes, compressed nodes (percent above the recording, rounded up; None: not recorded)
    ("succeeded", 0.8, 1, None),
    ("rejected", 0.5, 5, None),
    ("retrained", 0.4, 3, None),
    ("pod-deleted-retried", 0.6, 1, None),
    ("phases-record-frozen", 0.7, 2, 18),
    ("sweep-record-frozen", 0.3, 4, 10),
]
"""Runs whose stages all ran; a pod of one was lost, and it has a node more."""
OTHERS = [("groups-of-chunks-succeeded", 0.1, 7), ("failed-workflow-too-large", 0.1, 4)]
"""In the one most checkpoints came from the cache, the other failed in the middle: specification, nodes of a stage."""


@dataclass(frozen=True)
class Recorded:
    documents: list[Any]
    spec: int
    nodes: int
    count: int
    compressed: int
    stages: dict[str, int]


def recorded(name: str) -> Recorded:
    return Recorded(**json.loads(gzip.decompress((ASSETS / f"{name}.json.gz").read_bytes())))


def predicted(name: str) -> WorkflowSize:
    return predict(recorded(name).documents, LOOPS.get(name))


def with_mlflow(documents: list[Any]) -> list[Any]:
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        added = [{"name": name, "value": value} for name, value in MLFLOW.items()]
        executor["container"]["env"] = [*executor["container"].get("env", ()), *added]
    return documents


def above(size: float, recording: float) -> float:
    """Returns by how many percent a prediction is above a recording."""
    return 100 * (size / recording - 1)


@pytest.mark.parametrize(("name", "spec", "nodes", "compressed"), TABLE, ids=[name for name, *_ in TABLE])
def test_size_of_a_run_that_ended_is_a_little_above_the_recording(
    name: str, spec: float, nodes: float, compressed: float | None
) -> None:
    size, found = predicted(name), recorded(name)
    assert 0 <= above(size.spec, found.spec) <= spec
    assert 0 <= above(size.nodes, found.nodes) <= nodes
    assert compressed is None or 0 <= above(size.compressed, found.compressed) <= compressed


@pytest.mark.parametrize(("name", "spec", "stage"), OTHERS, ids=[name for name, *_ in OTHERS])
def test_a_stage_of_other_runs_is_a_little_above_the_recording(name: str, spec: float, stage: float) -> None:
    size, found = predicted(name), recorded(name)
    assert 0 <= above(size.spec, found.spec) <= spec
    if name.startswith("groups"):
        size = predict(with_mlflow(found.documents))
    assert 0 <= above(size.nodes / size.pods, sum(found.stages.values()) / len(found.stages)) <= stage


def test_nodes_of_a_hundred_chunks_are_compressed_as_much_as_argo_did() -> None:
    found, size = recorded("failed-workflow-too-large"), predicted("failed-workflow-too-large")
    assert 0 <= above(size.compressed / size.nodes, found.compressed / found.nodes) <= 9


@pytest.mark.parametrize("name", ["succeeded", "rejected", "retrained"])
def test_runs_whose_record_stayed_readable_are_predicted_to(name: str) -> None:
    assert predicted(name).readable
    assert predicted(name).ends


@pytest.mark.parametrize("name", ["phases-record-frozen", "sweep-record-frozen"])
def test_runs_whose_record_froze_are_predicted_to(name: str) -> None:
    size = predicted(name)
    assert size.ends
    assert not size.readable
    assert size.pods // 2 < size.readable_stages < size.pods


def test_run_that_outgrew_kubernetes_is_predicted_to_where_it_did() -> None:
    size, found = predicted("failed-workflow-too-large"), recorded("failed-workflow-too-large")
    assert not size.ends
    assert 0.9 * len(found.stages) < size.possible_stages <= len(found.stages)  # it ended in chunk 69 of 100


def recipe(*changes: str) -> Recipe:
    return load.load(str(RECIPE), ["store=s3://bucket", "resources.secret=store", *changes])


def fitted(tmp_path: Path, found: Recipe, pipeline: Pipeline = Pipeline.finetune) -> WorkflowSize:
    path = str(tmp_path / "pipeline.yaml")
    write_package(found, path, pipeline)
    return pipeline_file.check_fits(path, found, pipeline)


def test_few_chunks_stay_readable_and_nothing_is_said(tmp_path: Path) -> None:
    size = fitted(tmp_path, recipe("chunks.count=2"))
    assert size.pods == 2 * 2 + 5
    assert pipeline_file.readability_warning(size) == ""


def test_where_the_record_stops_is_said_with_the_stage(tmp_path: Path) -> None:
    size = fitted(tmp_path, recipe("chunks.count=40"))
    assert f"until about {size.readable_stages} of {size.pods} have ended" in pipeline_file.readability_warning(size)
    assert 10 < size.readable_stages < size.pods


def test_hundred_chunks_of_the_quickstart_fit(tmp_path: Path) -> None:
    found = load.load(str(QUICKSTART), ["chunks.count=100", "store=s3://bucket", "resources.secret=store"])
    size = fitted(tmp_path, found)
    assert size.ends
    assert size.pods == 2 * 100 + 5


def test_hundred_chunks_on_gpus_behind_a_gate_run_to_their_end(tmp_path: Path) -> None:
    """With what a recipe for spot nodes asks for; Kubeflow's own MLflow takes a part of the margin."""
    gpus = (
        "chunks.count=100",
        "resources.gpus=1",
        "resources.memory=64Gi",
        "resources.node_selector={pool: spot}",
        "resources.tolerations=[{key: spot, operator: Exists, effect: NoSchedule}]",
        "evaluation.gate={perplexity: '<= baseline'}",
    )
    path = str(tmp_path / "pipeline.yaml")
    write_package(recipe(*gpus), path)
    with open(path, encoding="utf-8") as file:
        documents = list(yaml.load_all(file, yaml.CSafeLoader))
    assert predict(documents).ends
    size = predict(with_mlflow(documents))
    assert size.spec + size.compressed / MARGIN < 0.96 * MAX_WORKFLOW_BYTES


def test_sweep_counts_each_trial_of_each_rung_and_is_refused_beyond_the_limit(tmp_path: Path) -> None:
    changes = [
        "chunks.count=4",
        "sweep.parameters={training.learning_rate: {min: 1.0e-4, max: 1.0e-3}}",
    ]
    few = fitted(tmp_path, recipe(*changes, "sweep.trials=4"), Pipeline.sweep)
    assert few.ends
    with pytest.raises(UserError, match=r"stages do not fit one workflow.*would fail at about stage") as error:
        fitted(tmp_path, recipe(*changes, "sweep.trials=500"), Pipeline.sweep)
    assert "baton sweep run" in str(error.value.remedy)


@pytest.mark.parametrize(
    ("device", "pruning", "pods"),
    [
        # begin, split, tokenize, enter, evaluate, export and report; a pod a device and a judge for each rung
        pytest.param("shared", "sweep.halving={eta: 2}", 7 + 5 * 4 + 2 + 6, id="eta 2"),
        pytest.param("shared", "sweep.halving={eta: 4}", 7 + 3 * 4 + 1 + 4, id="eta 4"),
        pytest.param("shared", "sweep.halving=null", 7 + 4 + 1, id="all to the end"),
        pytest.param("own", "sweep.halving={eta: 4}", None, id="a pod for each chunk"),
    ],
)
def test_devices_and_rungs_decide_the_size_of_a_shared_search(
    device: str, pruning: str, pods: int | None, tmp_path: Path
) -> None:
    rates = "sweep.parameters={training.learning_rate: {min: 1.0e-4, max: 1.0e-3}}"
    found = recipe(rates, "chunks.count=20", "sweep.trials=64", "sweep.parallel=4", pruning, f"sweep.device={device}")
    if pods is None:
        with pytest.raises(UserError, match="stages do not fit one workflow") as error:
            fitted(tmp_path, found, Pipeline.sweep)
        assert "Set sweep.device to shared" in str(error.value.remedy)
        return
    size = fitted(tmp_path, found, Pipeline.sweep)
    assert size.pods == pods
    assert size.spec + size.compressed < 0.3 * MAX_WORKFLOW_BYTES


def test_ids_of_a_device_that_has_many_trials_are_counted(tmp_path: Path) -> None:
    rates = "sweep.parameters={training.learning_rate: {min: 1.0e-4, max: 1.0e-3}}"
    few, many = (
        fitted(
            tmp_path,
            recipe(rates, "chunks.count=4", "sweep.device=shared", "sweep.parallel=1", f"sweep.trials={trials}"),
            Pipeline.sweep,
        )
        for trials in (2, 1000)
    )
    assert many.pods == few.pods
    assert many.nodes > few.nodes + 6 * 5 * 900  # a text of five characters a trial, six times in the nodes of a pod


def test_cluster_that_keeps_states_in_a_database_is_not_held_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = "sweep.parameters={training.learning_rate: {min: 1.0e-4, max: 1.0e-3}}"
    monkeypatch.setenv(pipeline_file.WORKFLOW_LIMIT, str(10**9))
    size = fitted(tmp_path, recipe("chunks.count=4", "sweep.trials=500", rates), Pipeline.sweep)
    assert size.ends
    assert "baton status" in pipeline_file.readability_warning(size)  # Kubeflow reads no database of Argo's


def test_limit_is_met() -> None:
    room = MAX_WORKFLOW_BYTES - 2_000
    size = WorkflowSize(spec=1_000, nodes=10 * room, compressed=room + 1, pods=100)
    assert not size.ends
    assert replace(size, compressed=room).ends


def test_what_no_cluster_takes_runs_here() -> None:
    """Argo's limit is for a workflow; the local engine reads the same file and has none."""
    text = "".join(random.Random(0).choices(string.ascii_letters + string.digits, k=1_200_000))
    recipe = load.load(str(RECIPE))
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"system": text})})
    with packaged(recipe, "large") as package:
        assert Path(package).stat().st_size > MAX_WORKFLOW_BYTES
        with pytest.raises(UserError, match="do not fit one workflow"):
            pipeline_file.check_fits(package, recipe)
