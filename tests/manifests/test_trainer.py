"""A chunk's TrainJob and the runtime it starts from: as Trainer's own schema has them, restricted, with few rights."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from baton.recipe import load
from baton.train.trainjob import Object, labels, owner_reference, stage_owner, train_job
from tests.manifests.building import K8S
from tests.manifests.trainer_schema import problems

COMPONENT = K8S / "components" / "trainer"
SCRATCH = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
RUN = "s3://baton/runs/demo-20260101-000000"
CURRENT = "1.37"
EVERYTHING = [
    "resources.nodes=2",
    "resources.gpus=4",
    "training.batch_size=16",
    "resources.cpu=16",
    "resources.memory=200Gi",
    "resources.image=registry.example.com/baton-gpu:1",
    "resources.secret=baton-store",
    "resources.secret_env.HF_TOKEN=hub/token",
    "resources.env.AWS_ENDPOINT_URL=http://s3:9000",
    "resources.image_pull_secret=registry",
    "resources.cache_claim=cache",
    "store.cache_dir=/cache",
    "resources.capacity=spot",
    "resources.node_selector.pool=gpu",
    'resources.tolerations=[{"key":"nvidia.com/gpu"}]',
    "resources.labels.team=nlp",
    "resources.deadline=72h",
    'chunks.preemption.node_taints=["going"]',
    "tracking.prometheus_port=9095",
]


def _job(*overrides: str, index: int = 3, owner: Object | None = None) -> dict[str, Any]:
    return train_job(load.load(SCRATCH, [*overrides]), RUN, index, owner)


def _component() -> list[dict[str, Any]]:
    return [document for path in COMPONENT.glob("[!k]*.yaml") for document in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("overrides", [["resources.nodes=2"], EVERYTHING], ids=["least", "everything"])
def test_the_job_is_of_the_schema(overrides: list[str]) -> None:
    assert problems(_job(*overrides, owner=owner_reference("stage-1", "0a-1b"))) == []


def test_the_runtime_is_of_the_schema() -> None:
    (runtime,) = (document for document in _component() if document["kind"] == "TrainingRuntime")
    assert problems(runtime) == []
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (job["name"], [x["name"] for x in job["template"]["spec"]["template"]["spec"]["containers"]]) == (
        "node",
        ["node"],
    )


def test_the_other_objects_are_of_kubernetes_schema() -> None:
    others = [document for document in _component() if document["kind"] != "TrainingRuntime"]
    assert sorted(x["kind"] for x in others) == ["NetworkPolicy", "Role", "RoleBinding", "ServiceAccount"]
    for document in others:
        kubernetes_validate.validate(document, CURRENT, strict=True)


def test_the_schema_refuses_what_trainer_would() -> None:
    job = _job("resources.nodes=2")
    job["spec"]["trainer"]["numNode"] = 2
    job["spec"]["trainer"]["numProcPerNode"] = "auto"
    del job["spec"]["runtimeRef"]["name"]
    job["spec"]["podTemplateOverrides"] = []  # of Trainer 2.1
    found = "\n".join(problems(job))
    assert len(problems(job)) == 4
    for expected in ("'numNode' was unexpected", "'auto' is not of type 'integer'", "'name' is a required", "podTempl"):
        assert expected in found


def test_what_the_nodes_run() -> None:
    trainer = _job(*EVERYTHING)["spec"]["trainer"]
    assert trainer["command"] + trainer["args"] == [
        *("python3", "-m", "baton.kfp.process", "train_chunk"),
        *(RUN, "3"),
    ]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["image"] == "registry.example.com/baton-gpu:1"
    asked = {"cpu": "16", "memory": "200Gi", "nvidia.com/gpu": "4"}
    assert trainer["resourcesPerNode"] == {"limits": asked, "requests": asked}
    env = {entry.pop("name"): entry for entry in copy.deepcopy(trainer["env"])}
    assert env == {
        "PYTHONUNBUFFERED": {"value": "1"},
        "AWS_ENDPOINT_URL": {"value": "http://s3:9000"},
        "BATON_EVENTS": {"value": "stdout"},
        "BATON_PROMISED_GPUS": {"value": "4"},
        "AWS_ACCESS_KEY_ID": {"valueFrom": {"secretKeyRef": {"name": "baton-store", "key": "AWS_ACCESS_KEY_ID"}}},
        "AWS_SECRET_ACCESS_KEY": {
            "valueFrom": {"secretKeyRef": {"name": "baton-store", "key": "AWS_SECRET_ACCESS_KEY"}}
        },
        "HF_TOKEN": {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        "NODE_NAME": {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    }


def test_the_nodes_are_restricted_and_placed_as_the_recipe_says() -> None:
    (patch,) = _job(*EVERYTHING)["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/part-of": "baton",
        "app.kubernetes.io/component": "train-node",
        "baton/recipe": "scratch",
        "baton/capacity": "spot",
        "team": "nlp",
    }
    assert pod["metadata"]["annotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": "9095"}
    assert pod["spec"] == {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 120,
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
            {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}},
        ],
        "containers": [
            {
                "name": "node",
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": "/cache"}],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }


def test_the_name_is_that_of_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _job("resources.nodes=2")["metadata"]["name"]
    for name in ("KFP_RUN_ID", "MLFLOW_WORKSPACE", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, "another-submission")
    again = _job("resources.nodes=2", owner=owner_reference("stage-2", "7f"))
    assert again["metadata"]["name"] == first
    handed_on = [entry["name"] for entry in again["spec"]["trainer"]["env"] if entry["value"] == "another-submission"]
    assert handed_on == ["KFP_RUN_ID", "MLFLOW_WORKSPACE"]  # and no token
    others = [
        _job("resources.nodes=4"),
        _job("resources.nodes=2", index=4),
        _job("resources.nodes=2", "resources.gpus=1"),
    ]
    assert len({first, *(job["metadata"]["name"] for job in others)}) == 4
    assert first.startswith("baton-demo-20260101-000000-003-")


ELASTIC = ["resources.nodes={min: 1, max: 4}", "training.parallel.virtual_workers=4"]


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_number_that_may_vary_is_not_in_the_name(nodes: int) -> None:
    job = train_job(load.load(SCRATCH, ELASTIC), RUN, 3, None, nodes)
    assert problems(job) == []
    assert job["spec"]["trainer"]["numNodes"] == nodes
    assert job["metadata"]["name"] == _job(*ELASTIC)["metadata"]["name"]
    bounds = _job(*ELASTIC, "resources.nodes={min: 2, max: 2, patience: 1m}")
    assert job["metadata"]["name"] == bounds["metadata"]["name"], "nor are its bounds"
    others = [_job(*ELASTIC, "resources.nodes=4"), _job(*ELASTIC, "resources.cpu=2"), _job(*ELASTIC, index=4)]
    assert job["metadata"]["name"] not in {other["metadata"]["name"] for other in others}


def test_a_long_run_name_fits_the_names_of_pods() -> None:
    recipe = load.load(SCRATCH, ["resources.nodes=2"])
    name = train_job(recipe, f"s3://b/runs/{'x' * 23}-{'y' * 70}", 100, None)["metadata"]["name"]
    assert len(f"{name}-node-0-511-abcde") <= 63
    assert "--" not in name


def test_the_stages_pod_is_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    assert stage_owner() is None
    monkeypatch.setenv("KFP_POD_NAME", "demo-abc-1")
    monkeypatch.setenv("KFP_POD_UID", "0a-1b")
    job = _job("resources.nodes=2", owner=stage_owner())
    assert job["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "demo-abc-1", "uid": "0a-1b"}
    ]
    assert labels(RUN, 3).items() <= job["metadata"]["labels"].items()
    assert labels(RUN, 3) != labels("s3://other/runs/demo-20260101-000000", 3)


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ("baton", ("TrainingRuntime", "baton")),
        ("cluster/torch-distributed", ("ClusterTrainingRuntime", "torch-distributed")),
    ],
)
def test_the_runtime_is_the_recipes(runtime: str, expected: tuple[str, str]) -> None:
    reference = _job("resources.nodes=2", f"resources.runtime={runtime}")["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == expected


def test_rights_are_these_and_no_others() -> None:
    (role,) = (document for document in _component() if document["kind"] == "Role")
    rights = set()
    for rule in role["rules"]:
        rights |= set(itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"]))
    jobs = {("trainer.kubeflow.org", "trainjobs", verb) for verb in ("create", "get", "list", "patch", "delete")}
    assert rights == jobs | {("", "pods", "list"), ("", "pods/log", "get"), ("", "events", "list")}


def test_the_nodes_reach_each_other_and_nobody_elses() -> None:
    (policy,) = (document for document in _component() if document["kind"] == "NetworkPolicy")
    (labelled,) = _job("resources.nodes=2")["spec"]["runtimePatches"]
    (replicated,) = labelled["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod_labels = replicated["template"]["spec"]["template"]["metadata"]["labels"]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= pod_labels.items()
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": selector}}]}]
    nodes, controller = policy["spec"]["egress"]
    assert nodes == {"to": [{"podSelector": {"matchLabels": selector}}]}
    (peer,) = controller["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kubeflow-system"}
    labels = {"app.kubernetes.io/name": "trainer", "app.kubernetes.io/component": "manager"}
    assert peer["podSelector"]["matchLabels"] == labels
