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

import pytest
import yaml

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, recipe_file
from baton.pipelines.compiling import fits
from baton.pipelines.compiling.package import Pipeline, packaged, write_package
from baton.pipelines.compiling.workflow.pod import Assumed
from baton.pipelines.compiling.workflow.size import MAX_WORKFLOW_BYTES, WorkflowSize, predict

ASSETS = Path(__file__).parents[2] / "assets" / "workflow-sizes"
RECIPE = Path(__file__).parents[2] / "recipes" / "scratch.yaml"
ENDED = ["succeeded", "rejected", "retrained", "pod-deleted-retried", "phases-record-frozen", "sweep-record-frozen"]
"""Runs whose stages all ran; a pod of one was lost, and it has a node more."""
OTHERS = ["groups-of-chunks-succeeded", "failed-workflow-too-large"]
"""In the one most checkpoints came from the cache, the other failed in the middle."""
MLFLOW = {
    "MLFLOW_RUN_ID": "6a951f6a72c445ed82864a0ad844b924",
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000",
    "MLFLOW_EXPERIMENT_ID": "1",
}
ASSUMED = {
    "groups-of-chunks-succeeded": Assumed(environment=MLFLOW),
    "sweep-record-frozen": Assumed(loops={"data": 1, "rung 1": 3, "rung 2": 1}),
}


@dataclass(frozen=True)
class Recorded:
    documents: list[object]
    spec: int
    nodes: int
    count: int
    compressed: int
    stages: dict[str, int]


def recorded(name: str) -> Recorded:
    return Recorded(**json.loads(gzip.decompress((ASSETS / f"{name}.json.gz").read_bytes())))


def predicted(name: str) -> WorkflowSize:
    return predict(recorded(name).documents, ASSUMED.get(name))


@pytest.mark.parametrize("name", ENDED + OTHERS)
def test_specification_is_within_one_percent(name: str) -> None:
    assert predicted(name).spec == pytest.approx(recorded(name).spec, rel=0.01)


@pytest.mark.parametrize("name", ENDED)
def test_nodes_of_a_run_that_ended_are_within_five_percent(name: str) -> None:
    assert predicted(name).nodes == pytest.approx(recorded(name).nodes, rel=0.05)


@pytest.mark.parametrize("name", ENDED + OTHERS)
def test_nodes_of_each_stage_that_ran_are_within_six_percent(name: str) -> None:
    stages = predicted(name).stages
    run = {path: size for path, size in recorded(name).stages.items() if path in stages}
    assert len(run) >= 5
    assert {path: stages[path] for path in run} == pytest.approx(run, rel=0.06)


@pytest.mark.parametrize("name", ["phases-record-frozen", "sweep-record-frozen"])
def test_compressed_nodes_are_within_eight_percent(name: str) -> None:
    assert predicted(name).compressed == pytest.approx(recorded(name).compressed, rel=0.08)


def test_nodes_of_a_hundred_chunks_are_compressed_as_much_as_argo_did() -> None:
    found, size = recorded("failed-workflow-too-large"), predicted("failed-workflow-too-large")
    assert size.compressed / size.nodes == pytest.approx(found.compressed / found.nodes, rel=0.08)


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
    assert size.possible_stages == pytest.approx(len(found.stages), rel=0.08)  # it ended in chunk 69 of 100


def test_cluster_that_adds_variables_to_pods_costs_their_text_six_times() -> None:
    documents = recorded("groups-of-chunks-succeeded").documents
    plain, added = predict(documents), predict(documents, Assumed(environment=MLFLOW))
    each = (added.nodes - plain.nodes) / added.pods
    assert each > 6 * sum(len(name) + len(value) for name, value in MLFLOW.items())


def recipe(*changes: str) -> Recipe:
    return recipe_file.load(str(RECIPE), ["store=s3://bucket", "resources.secret=store", *changes])


def fitted(tmp_path: Path, found: Recipe, pipeline: Pipeline = Pipeline.finetune) -> WorkflowSize:
    path = str(tmp_path / "pipeline.yaml")
    write_package(found, path, pipeline)
    return fits.check_fits(path, found, pipeline)


def test_few_chunks_stay_readable_and_nothing_is_said(tmp_path: Path) -> None:
    size = fitted(tmp_path, recipe("chunks.count=2"))
    assert size.pods == 2 * 2 + 5
    assert fits.frozen_note(size) == ""


def test_where_the_record_stops_is_said_with_the_stage(tmp_path: Path) -> None:
    size = fitted(tmp_path, recipe("chunks.count=40"))
    assert f"until about {size.readable_stages} of {size.pods} have ended" in fits.frozen_note(size)
    assert 10 < size.readable_stages < size.pods


def test_hundred_chunks_on_gpus_behind_a_gate_run_to_their_end(tmp_path: Path) -> None:
    """With what a recipe for spot nodes asks for, and the variables of Kubeflow's own MLflow besides."""
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
    assert predict(documents, Assumed(environment=MLFLOW)).ends


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


def test_cluster_that_keeps_states_in_a_database_is_not_held_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = "sweep.parameters={training.learning_rate: {min: 1.0e-4, max: 1.0e-3}}"
    monkeypatch.setenv(fits.LIMIT, str(10**9))
    size = fitted(tmp_path, recipe("chunks.count=4", "sweep.trials=500", rates), Pipeline.sweep)
    assert size.ends
    assert "baton status" in fits.frozen_note(size)  # Kubeflow reads no database of Argo's


def test_limit_is_met_by_the_margin() -> None:
    room = MAX_WORKFLOW_BYTES - 2_000
    size = WorkflowSize(spec=1_000, nodes=10 * room, compressed=room, pods=100, stages={})
    assert not size.ends
    assert replace(size, compressed=int(room / 1.06)).ends


def test_what_no_cluster_takes_runs_here() -> None:
    """Argo's limit is for a workflow; the local engine reads the same file and has none."""
    text = "".join(random.Random(0).choices(string.ascii_letters + string.digits, k=1_200_000))
    recipe = recipe_file.load(str(RECIPE))
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"system": text})})
    with packaged(recipe, "large") as package:
        assert Path(package).stat().st_size > MAX_WORKFLOW_BYTES
        with pytest.raises(UserError, match="do not fit one workflow"):
            fits.check_fits(package, recipe)
