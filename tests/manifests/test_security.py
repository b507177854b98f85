"""Pods that Pod Security "restricted" takes, rights with their reasons, nothing in or out but what is said."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler

from baton.pipelines.finetune import finetune
from baton.recipe import load
from tests.manifests.building import K8S, OVERLAYS, named, objects, pods

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
"""https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""

RIGHTS = {
    "local": {
        ("baton-runner", "configmaps", "kfp-launcher", "get"),
        ("baton-runner", "secrets", "mlpipeline-minio-artifact", "get"),
        ("baton-runner", "pods", "*", "get"),
        ("baton-runner", "workflowtaskresults", "*", "create"),
        ("baton-runner", "workflowtaskresults", "*", "patch"),
    },
    "spot": {
        ("baton-runner", "configmaps", "kfp-launcher", "get"),
        ("baton-runner", "secrets", "baton-store", "get"),
        ("baton-runner", "pods", "*", "get"),
        ("baton-runner", "workflowtaskresults", "*", "create"),
        ("baton-runner", "workflowtaskresults", "*", "patch"),
        ("baton-node-reader", "nodes", "*", "get"),
    },
    "multi-tenant": {
        ("baton-runner", "configmaps", "kfp-launcher", "get"),
        ("baton-runner", "secrets", "mlpipeline-minio-artifact", "get"),
        ("baton-runner", "pods", "*", "get"),
        ("baton-runner", "workflowtaskresults", "*", "create"),
        ("baton-runner", "workflowtaskresults", "*", "patch"),
        *(("baton-submitter", "experiments", "*", verb) for verb in ("get", "list", "create")),
        *(("baton-submitter", "runs", "*", verb) for verb in ("create", "get", "list", "terminate", "retry")),
        *(("baton-submitter", "pipelines", "*", verb) for verb in ("create", "get", "list")),
        *(("baton-submitter", "jobs", "*", verb) for verb in ("create", "get", "list", "delete")),
    },
}
"""(role, resource, object, verb): every right there is."""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay: str) -> None:
    assert set(pods(overlay)) == ({"baton-mlflow"} if overlay == "local" else {"baton-mlflow", "baton-postgresql"})
    for template in pods(overlay).values():
        pod = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(set(volume) - {"name"} <= VOLUMES for volume in pod["volumes"])
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"].get("runAsUser") != 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "initContainers" not in pod
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert all("hostPort" not in port for port in container["ports"])


BY_KUBEFLOW = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""What the backend sets in a stage's container: kubeflow/pipelines 2.17.0, argocompiler/security_context.go."""


@pytest.mark.parametrize("gpus", [0, 1])
def test_stages_are_restricted(gpus: int, tmp_path: Path) -> None:
    recipe = load.load(
        str(Path(__file__).parents[1] / "recipes/scratch.yaml"),
        [f"resources.gpus={gpus}", "resources.secret=baton-store", "store.cache_dir=/cache", "resources.cache_claim=c"],
    )
    compiler.Compiler().compile(finetune(recipe), str(tmp_path / "p.yaml"))
    _, platform = yaml.safe_load_all((tmp_path / "p.yaml").read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {"exec-data-split", "exec-train-chunk", "exec-evaluate", "exec-report"} <= executors.keys()
    volumes = set()
    for executor in executors.values():
        assert {**BY_KUBEFLOW, **executor["securityContext"]} == {**BY_KUBEFLOW, "runAsNonRoot": True}
        volumes |= {name for name in executor if name.endswith(("Mount", "Mounts", "AsVolume", "Volume", "Memory"))}
    assert volumes == {"emptyDirMounts", "pvcMount"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_that_ask_nothing_of_the_cluster_have_no_token(overlay: str) -> None:
    for template in pods(overlay).values():
        assert template["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_have_a_version(overlay: str) -> None:
    for template in pods(overlay).values():
        for container in template["spec"]["containers"]:
            name, _, tag = container["image"].partition(":")
            assert tag, name
            assert tag != "latest"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rights_are_these_and_no_others(overlay: str) -> None:
    rights = set()
    for role in (x for x in objects(overlay) if x["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            triples = itertools.product(rule["resources"], rule.get("resourceNames", ["*"]), rule["verbs"])
            rights |= {(role["metadata"]["name"], *triple) for triple in triples}
    assert rights == RIGHTS[overlay]


def test_each_verb_has_a_reason() -> None:
    rules = 0
    for path in K8S.rglob("*.yaml"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if verbs := re.match(r"\s+verbs: \[(.*)\]", line):
                start = max(n for n in range(number) if lines[n].lstrip().startswith("- apiGroups"))
                comment = ""
                # The comment is above the rule, or above the role where it has a single rule.
                for above in reversed(lines[:start]):
                    if above.lstrip().startswith("#"):
                        comment = above + comment
                    elif comment:
                        break
                for verb in verbs[1].split(", "):
                    assert re.search(rf"\b{verb}\b[^#]*:", comment), f"{path.name}: {verb} has no reason"
                rules += 1
    assert rules == 15


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_is_in_a_manifest(overlay: str) -> None:
    assert all(document["kind"] != "Secret" for document in objects(overlay))
    for template in pods(overlay).values():
        for container in template["spec"]["containers"]:
            by_value = [variable["name"] for variable in container["env"] if "value" in variable]
            assert not [name for name in by_value if re.search("KEY|PASSWORD|SECRET|TOKEN|URI", name)]
    for document in (x for x in objects(overlay) if x["kind"] == "ConfigMap"):
        assert not re.search(r"://[^/@\s\"]+:[^/@\s\"]+@", json.dumps(document["data"]))


def test_secret_files_stay_out_of_git() -> None:
    assert (K8S / "secrets" / ".gitignore").read_text() == "*.env\n"
    for template in (K8S / "secrets").glob("*.env.example"):
        values = [line.partition("=")[2] for line in template.read_text().splitlines() if not line.startswith("#")]
        assert all(value == "" or "PASSWORD" in value for value in values)


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions", []):
        if expression["operator"] == "In" and labels.get(expression["key"]) not in expression["values"]:
            return False
        if expression["operator"] == "Exists" and expression["key"] not in labels:
            return False
        assert expression["operator"] in ("In", "Exists")
    return True


STAGE = {"app.kubernetes.io/part-of": "baton", "baton/recipe": "r", "workflows.argoproj.io/workflow": "r-x1"}
MLFLOW = {"app.kubernetes.io/name": "baton-mlflow", "app.kubernetes.io/part-of": "baton-tracking"}
DATABASE = {"app.kubernetes.io/name": "baton-postgresql", "app.kubernetes.io/part-of": "baton-database"}
STRANGER = {"app": "notebook"}
IN = {"Ingress": "ingress", "Egress": "egress"}

STAGE_OUT = {"baton-dns", "baton-store", "baton-stages-to-tracking", "baton-workflows-to-api"}
REACH = {
    ("local", "stage"): (STAGE_OUT | {"baton-stages-to-hub"}, set()),
    ("local", "mlflow"): ({"baton-dns", "baton-store"}, {"baton-tracking-from-stages"}),
    ("spot", "stage"): (STAGE_OUT | {"baton-stages-to-hub"}, {"baton-stages-from-prometheus"}),
    ("spot", "mlflow"): ({"baton-dns", "baton-store", "baton-tracking-to-database"}, {"baton-tracking-from-stages"}),
    ("spot", "database"): ({"baton-dns"}, {"baton-database-from-tracking"}),
    ("multi-tenant", "stage"): (STAGE_OUT, {"baton-stages-from-prometheus"}),
    ("multi-tenant", "mlflow"): (
        {"baton-dns", "baton-store", "baton-tracking-to-database"},
        {"baton-tracking-from-stages"},
    ),
    ("multi-tenant", "database"): ({"baton-dns"}, {"baton-database-from-tracking"}),
    ("multi-tenant", "stranger"): ({"baton-dns"}, set()),
}
"""(overlay, pod) → policies that let it out, policies that let others in."""


@pytest.mark.parametrize(("overlay", "who"), REACH)
def test_pods_reach_what_they_need_and_no_more(overlay: str, who: str) -> None:
    labels = {"stage": STAGE, "mlflow": MLFLOW, "database": DATABASE, "stranger": STRANGER}[who]
    applying = [
        x for x in objects(overlay) if x["kind"] == "NetworkPolicy" and _selects(x["spec"]["podSelector"], labels)
    ]
    deny = next(x for x in applying if x["metadata"]["name"] == "baton-deny-by-default")
    assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & deny["spec"].keys()
    out, into = ({x["metadata"]["name"] for x in applying if IN[way] in x["spec"]} for way in ("Egress", "Ingress"))
    assert (out, into) == REACH[overlay, who]


def test_beside_a_single_user_installation_its_own_servers_are_left_alone() -> None:
    for overlay in ("local", "spot"):
        for policy in (x for x in objects(overlay) if x["kind"] == "NetworkPolicy"):
            assert not _selects(policy["spec"]["podSelector"], {"app": "ml-pipeline"})
            assert not _selects(policy["spec"]["podSelector"], {"workflows.argoproj.io/workflow": "somebody-elses"})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_metadata_service_is_out_of_reach(overlay: str) -> None:
    for policy in (x for x in objects(overlay) if x["kind"] == "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            for block in (peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer):
                assert not block["cidr"].startswith("169.254")
                if block["cidr"] == "0.0.0.0/0":
                    assert "169.254.0.0/16" in block["except"]


def test_a_tenants_namespace_takes_restricted_pods_alone() -> None:
    labels = named("multi-tenant", "Namespace", "team-a")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_a_budget_stands_where_there_is_a_second_replica_and_nowhere_else() -> None:
    for overlay in OVERLAYS:
        budgets = [x for x in objects(overlay) if x["kind"] == "PodDisruptionBudget"]
        workloads = [x for x in objects(overlay) if "template" in x.get("spec", {})]
        guarded = [
            x["metadata"]["name"]
            for x in workloads
            for budget in budgets
            if _selects(budget["spec"]["selector"], x["spec"]["template"]["metadata"]["labels"])
        ]
        assert guarded == [x["metadata"]["name"] for x in workloads if x["spec"]["replicas"] > 1]


def test_the_policy_sets_what_the_classes_say() -> None:
    classes = {x["metadata"]["name"]: x for x in objects("spot") if x["kind"] == "PriorityClass"}
    (mutation,) = named("spot", "MutatingAdmissionPolicy", "baton-capacity")["spec"]["mutations"]
    patch = r'path: "/spec/(\w+)", value: variables\.spot \? (\S+) : (\S+)}'
    values = re.findall(patch, mutation["jsonPatch"]["expression"])
    read = {field: tuple(json.loads(value) for value in pair) for field, *pair in values}
    assert read == {
        "priorityClassName": ("baton-spot", "baton-on-demand"),
        "priority": (classes["baton-spot"]["value"], classes["baton-on-demand"]["value"]),
        "preemptionPolicy": (
            classes["baton-spot"]["preemptionPolicy"],
            classes["baton-on-demand"]["preemptionPolicy"],
        ),
    }


def test_launcher_settings_are_ones_that_kubeflow_reads() -> None:
    providers = yaml.safe_load(named("spot", "ConfigMap", "kfp-launcher")["data"]["providers"])
    assert providers["s3"]["default"]["credentials"] == {
        "fromEnv": False,
        "secretRef": {
            "secretName": "baton-store",
            "accessKeyKey": "AWS_ACCESS_KEY_ID",
            "secretKeyKey": "AWS_SECRET_ACCESS_KEY",
        },
    }
