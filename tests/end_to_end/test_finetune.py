"""The compiled pipeline: what a cluster reads in it, and what stays out of it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.kfp.component import code_version
from tests.support import conformance

QUICKSTART = Path(__file__).parents[2] / "pipelines/recipes/quickstart.yaml"
BATON = str(Path(sys.executable).parent / "baton")


def _compile(recipe: Path, target: Path, *more: str) -> list[dict[str, Any]]:
    command = [BATON, "compile", str(recipe), "-o", str(target), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(target.read_text()))
    assert conformance.check_documents(documents) == []
    return documents


@pytest.fixture(scope="module")
def on_spot_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The compiled file of a recipe that asks for everything a pod can ask for."""
    settings = {
        "resources.gpus": "2",
        "resources.cpu": "8",
        "resources.memory": "64Gi",
        "resources.shm": "16Gi",
        "resources.secret": "s3-keys",
        "resources.secret_env": "{HF_TOKEN: hub/token}",
        "resources.image": "registry.example/baton-python:abc123",
        "resources.node_selector": "{pool: spot}",
        "resources.tolerations": "[{key: spot, operator: Equal, value: 'true', effect: NoSchedule}]",
        "resources.labels": "{team: nlp}",
        "resources.env": "{AWS_ENDPOINT_URL: 'http://s3:9000'}",
        "resources.retries": "5",
        "resources.capacity": "spot",
        "resources.deadline": "72h",
        "resources.keep_pods": "48h",
        "resources.cache_claim": "node-cache",
        "store.cache_dir": "/cache",
        "chunks.count": "3",
        "chunks.preemption.node_taints": "[cloud.google.com/impending-node-termination]",
    }
    target = tmp_path_factory.mktemp("spot") / "pipeline.yaml"
    return _compile(QUICKSTART, target, *(w for k, v in settings.items() for w in ("--set", f"{k}={v}")))


def _executors(documents: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns task name → (container, Kubernetes settings)."""
    pipeline, platform = documents
    containers = pipeline["deploymentSpec"]["executors"]
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    labels = {
        name: pipeline["components"][task["componentRef"]["name"]]["executorLabel"]
        for name, task in pipeline["root"]["dag"]["tasks"].items()
    }
    return {name: (containers[label]["container"], settings.get(label, {})) for name, label in labels.items()}


COMPUTE = {"train-chunk", "train-chunk-2", "train-chunk-3", "evaluate"}


def test_accelerators_are_asked_for_by_the_pods_that_run_the_model_alone(on_spot_gpus: list[dict[str, Any]]) -> None:
    for name, (container, settings) in _executors(on_spot_gpus).items():
        accelerator = container.get("resources", {}).get("accelerator")
        assert (accelerator is not None) == (name in COMPUTE), name
        assert ("nodeSelector" in settings) == (name in COMPUTE), name
        assert ("tolerations" in settings) == (name in COMPUTE), name
        if name in COMPUTE:
            assert accelerator == {
                "count": "2", "resourceCount": "2", "resourceType": "nvidia.com/gpu", "type": "nvidia.com/gpu",
            }  # fmt: skip
            assert container["resources"]["resourceMemoryLimit"] == "64Gi"
            assert settings["nodeSelector"]["labels"] == {"pool": "spot"}
            assert settings["emptyDirMounts"][0]["mountPath"] == "/dev/shm"


def test_the_cache_is_mounted_in_the_pods_that_run_the_model_alone(on_spot_gpus: list[dict[str, Any]]) -> None:
    for name, (_, settings) in _executors(on_spot_gpus).items():
        mounts = settings.get("pvcMount", [])
        assert len(mounts) == (name in COMPUTE), name
        for mount in mounts:
            assert mount["constant"] == "node-cache"
            assert mount["mountPath"] == "/cache"


def test_every_pod_knows_its_run_and_chunks_their_node(on_spot_gpus: list[dict[str, Any]]) -> None:
    run = {"name": "KFP_RUN_ID", "fieldPath": "metadata.labels['pipeline/runid']"}
    for name, (_, settings) in _executors(on_spot_gpus).items():
        node = [{"name": "NODE_NAME", "fieldPath": "spec.nodeName"}] if name.startswith("train-chunk") else []
        assert settings["fieldPathAsEnv"] == [run, *node], name


def test_no_pod_may_be_root_unless_the_recipe_says_so(on_spot_gpus: list[dict[str, Any]], tmp_path: Path) -> None:
    for name, (_, settings) in _executors(on_spot_gpus).items():
        assert settings["securityContext"] == {"runAsNonRoot": True}, name
    free = _compile(QUICKSTART, tmp_path / "p.yaml", "--set", "resources.run_as_non_root=false")
    assert "securityContext" not in str(free)


def test_the_run_has_a_deadline_and_its_pods_do_not_stay(on_spot_gpus: list[dict[str, Any]]) -> None:
    settings = on_spot_gpus[1]["platforms"]["kubernetes"]["pipelineConfig"]
    assert settings == {"activeDeadlineSeconds": 72 * 3600, "resourceTtlOnCompletion": 48 * 3600}


def test_the_kind_of_nodes_is_a_label_of_the_pods_that_run_the_model(on_spot_gpus: list[dict[str, Any]]) -> None:
    for name, (_, settings) in _executors(on_spot_gpus).items():
        labels = settings["podMetadata"]["labels"]
        assert labels.get("baton/capacity") == ("spot" if name in COMPUTE else None), name
        stage = "train-chunk" if name.startswith("train-chunk") else name.rstrip("-23")
        assert labels["app.kubernetes.io/component"] == stage


def test_a_new_run_is_named_by_a_placeholder_that_stands_alone(on_spot_gpus: list[dict[str, Any]]) -> None:
    """The backend's driver replaces it only where it is the whole value."""
    inputs = on_spot_gpus[0]["root"]["dag"]["tasks"]["data-split"]["inputs"]["parameters"]
    assert inputs["job_id"] == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    assert inputs["new_name"] == {"runtimeValue": {"constant": "quickstart"}}


def test_a_claim_without_a_folder_to_mount_it_at_is_refused(tmp_path: Path) -> None:
    settings = ["-o", str(tmp_path / "pipeline.yaml"), "--set", "resources.cache_claim=node-cache"]
    command = [BATON, "compile", str(QUICKSTART), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "resources.cache_claim" in done.stderr
    assert "store.cache_dir" in done.stderr


def test_every_pod_has_image_labels_and_credentials_by_reference(on_spot_gpus: list[dict[str, Any]]) -> None:
    for container, settings in _executors(on_spot_gpus).values():
        assert container["image"] == "registry.example/baton-python:abc123"
        assert settings["podMetadata"]["labels"]["team"] == "nlp"
        store, hub = settings["secretAsEnv"]
        assert store["secretName"] == "s3-keys"
        assert hub["secretName"] == "hub"
        assert hub["keyToEnv"] == [{"secretKey": "token", "envVar": "HF_TOKEN"}]
        assert {"name": "AWS_ENDPOINT_URL", "value": "http://s3:9000"} in container["env"]


def test_what_may_come_from_kubeflows_cache_is_given_the_baton(on_spot_gpus: list[dict[str, Any]]) -> None:
    """A baton from the split, which counts what is lost, and from nowhere else: nobody makes one on the way."""
    for name, task in on_spot_gpus[0]["root"]["dag"]["tasks"].items():
        may = name in ("tokenize", "train-chunk", "train-chunk-2")  # not the last chunk
        assert task.get("cachingOptions", {}) == ({"enableCache": True} if may else {}), name
        assert ("baton" in task["inputs"]["parameters"]) == (name != "data-split"), name


def test_a_chunks_number_is_an_input_of_its_own(on_spot_gpus: list[dict[str, Any]]) -> None:
    """The baton is the same for all of them: chunk 2 would be taken for chunk 1."""
    tasks = on_spot_gpus[0]["root"]["dag"]["tasks"]
    for number, name in enumerate(["train-chunk", "train-chunk-2", "train-chunk-3"], 1):
        assert tasks[name]["inputs"]["parameters"]["index"] == {"runtimeValue": {"constant": number}}


def test_what_takes_long_is_retried_for_a_day(on_spot_gpus: list[dict[str, Any]]) -> None:
    for key, task in on_spot_gpus[0]["root"]["dag"]["tasks"].items():
        if key.startswith(("data-split", "tokenize", "train-chunk", "evaluate", "export")):
            assert task["retryPolicy"]["maxRetryCount"] == 5
            assert task["retryPolicy"]["backoffMaxDuration"] == "86400s"
        else:
            assert key.startswith(("checkpoint", "report"))
            assert "retryPolicy" not in task


def _waits_for(tasks: dict[str, Any], name: str) -> set[str]:
    return set(tasks[name].get("dependentTasks", ()))


def test_the_stages_are_a_line_and_checkpoints_are_not_in_its_way(on_spot_gpus: list[dict[str, Any]]) -> None:
    tasks = on_spot_gpus[0]["root"]["dag"]["tasks"]
    line = ["data-split", "tokenize", "train-chunk", "train-chunk-2", "train-chunk-3", "evaluate", "export"]
    for before, after in itertools.pairwise(line):
        assert _waits_for(tasks, after) == {before}
        assert tasks[after]["inputs"]["parameters"]["baton"]["taskOutputParameter"]["producerTask"] == before
    assert _waits_for(tasks, "checkpoint") == {"train-chunk"}
    assert _waits_for(tasks, "checkpoint-2") == {"train-chunk-2", "checkpoint"}
    assert _waits_for(tasks, "checkpoint-3") == {"train-chunk-3", "checkpoint-2"}
    assert _waits_for(tasks, "report") == {"export", "checkpoint-3"}


def test_more_than_eight_chunks_lie_in_graphs_of_eight(tmp_path: Path) -> None:
    spec = _compile(QUICKSTART, tmp_path / "p.yaml", "--chunks", "20")[0]
    tasks = spec["root"]["dag"]["tasks"]
    groups = ["chunks-1", "chunks-9", "chunks-17"]
    for before, after in itertools.pairwise(["tokenize", *groups, "evaluate"]):
        assert _waits_for(tasks, after) == {before}
    assert [tasks[name]["taskInfo"]["name"] for name in groups] == ["chunks 1–8", "chunks 9–16", "chunks 17–20"]
    assert tasks["checkpoint-20"]["inputs"]["parameters"]["index"] == {"runtimeValue": {"constant": 20}}
    assert _waits_for(tasks, "checkpoint-20") == {"chunks-17"}
    inside = [spec["components"][f"comp-{name}"]["dag"]["tasks"] for name in groups]
    names = [{task["taskInfo"]["name"] for task in tasks.values()} for tasks in inside]
    ranges = [(1, 8), (9, 16), (17, 20)]
    for (first, last), found in zip(ranges, names, strict=True):
        # A graph has ended when all in it have: the last chunk's checkpoint is read back beside the next one's.
        read_back = range(max(first - 1, 1), last)
        chunks = range(first, last + 1)
        assert found == {f"train chunk {i}" for i in chunks} | {f"checkpoint {i}" for i in read_back}
    chunks = [task for tasks in inside for name, task in tasks.items() if name.startswith("train-chunk")]
    assert {task["componentRef"]["name"] for task in chunks} == {"comp-train-chunk"}
    assert [task["taskInfo"]["name"] for task in chunks if "cachingOptions" not in task] == ["train chunk 20"]


def test_the_file_holds_neither_the_source_of_stages_nor_their_documentation(
    on_spot_gpus: list[dict[str, Any]],
) -> None:
    spec = on_spot_gpus[0]
    assert "description" not in str(spec["components"])
    for name, (container, _) in _executors(on_spot_gpus).items():
        room = re.sub(r"-\d$", "", name).replace("-", "_")
        assert container["command"][:4] == ["python3", "-m", "baton.kfp.executor", room]
        # What tells one Baton from another in Kubeflow's cache, where an image keeps its tag.
        assert re.fullmatch(rf"{re.escape(version('baton-llm'))}-[0-9a-f]{{8}}", container["command"][4])


CODE = {
    "evaluate/component.py": "def evaluate(): ...",
    "evaluate/figures.py": "LOSS = 1",
    "shared/pages/page.html.j2": "<p>",
}


@pytest.mark.parametrize("name", [*CODE, "shared/new.py"])
def test_other_code_of_any_stage_is_another_command(name: str, tmp_path: Path) -> None:
    """Kubeflow's cache tells commands apart, and knows nothing of the image behind a tag."""
    for folder in ("checkout", "wheel", "changed"):
        for path, text in CODE.items():
            (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / path).write_text(text, encoding="utf-8")
    (tmp_path / "wheel/evaluate/__pycache__").mkdir()
    (tmp_path / "wheel/evaluate/__pycache__/figures.cpython-311.pyc").write_bytes(b"made here")
    (tmp_path / "changed" / name).write_text("other", encoding="utf-8")
    assert code_version(tmp_path / "checkout") == code_version(tmp_path / "wheel") != code_version(tmp_path / "changed")


def test_all_commands_hold_the_code_of_this_baton(on_spot_gpus: list[dict[str, Any]]) -> None:
    assert {container["command"][4] for container, _ in _executors(on_spot_gpus).values()} == {code_version()}


def test_code_is_read_where_a_pipeline_is_compiled_alone() -> None:
    """Each process of a stage and each command imports what declares stages."""
    looks = "import baton.pipelines.finetune, baton.kfp.component as d; print(d.code_version.cache_info().currsize)"
    done = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_a_person_can_fill_in_few_parameters(on_spot_gpus: list[dict[str, Any]]) -> None:
    parameters = on_spot_gpus[0]["root"]["inputDefinitions"]["parameters"]
    named = {"run_name", "store", "source", "base_model", "seed", "overrides"}
    assert set(parameters) == named | {"learning_rate", "batch_size", "epochs", "max_steps"}
    assert all(parameter["description"] for parameter in parameters.values())
    assert all("defaultValue" in parameter for parameter in parameters.values())


@pytest.mark.slow
def test_a_hundred_chunks_compile_and_one_more_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "hundred.yaml"
    documents = _compile(QUICKSTART, target, "--chunks", "100")
    graphs = [component["dag"]["tasks"] for component in documents[0]["components"].values() if "dag" in component]
    assert sum(name.startswith("train-chunk") for tasks in graphs for name in tasks) == 100
    assert target.stat().st_size < 200_000
    command = [BATON, "compile", str(QUICKSTART), "-o", str(target), "--chunks", "101"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "chunks.count" in done.stderr
    assert "100" in done.stderr


def test_the_pipeline_does_not_import_the_training_stack() -> None:
    heavy = ("torch", "transformers", "mlflow")
    code = f"import sys, baton.pipelines.finetune; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
