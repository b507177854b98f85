"""`components/heal`: a CronJob of the namespace, restricted, with rights on Kubeflow's runs and none in Kubernetes."""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import kubernetes_validate
import typer.main
import yaml

from baton.cli.app import app
from baton.kubeflow.connection import FILES
from tests.manifests.building import K8S

COMPONENT = K8S / "components" / "heal"
MIB = 100


def _component() -> dict[str, dict[str, Any]]:
    documents = [x for path in COMPONENT.glob("[!k]*.yaml") for x in yaml.safe_load_all(path.read_text())]
    return {document["kind"]: document for document in documents}


def _pod() -> dict[str, Any]:
    pod: dict[str, Any] = _component()["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]
    return pod


def test_the_objects_are_of_kubernetes_schema() -> None:
    kinds = {"ServiceAccount", "Role", "RoleBinding", "CronJob", "ConfigMap", "NetworkPolicy"}
    assert set(_component()) == kinds
    listed = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["resources"]
    assert {path.name for path in COMPONENT.glob("[!k]*.yaml")} == set(listed)
    for document in _component().values():
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_the_pod_is_restricted_and_small() -> None:
    pod = _pod()["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"] == {"memory": f"{MIB}Mi"}
    assert not any("gpu" in name for kind in container["resources"].values() for name in kind)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    (token,) = (volume["projected"] for volume in pod["volumes"] if "projected" in volume)
    (source,) = token["sources"]
    settings = _component()["ConfigMap"]["data"]
    assert settings[FILES[1]] == f"{mounts['token']}/{source['serviceAccountToken']['path']}"
    assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org"


def test_rights_are_these_and_no_others() -> None:
    rules = _component()["Role"]["rules"]
    rights = {each for rule in rules for each in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])}
    runs = {("pipelines.kubeflow.org", "runs", verb) for verb in ("create", "get", "list", "retry", "terminate")}
    assert rights == runs | {("pipelines.kubeflow.org", "pipelines", "get")}
    account = _component()["ServiceAccount"]["metadata"]["name"]
    assert _pod()["spec"]["serviceAccountName"] == account
    assert [subject["name"] for subject in _component()["RoleBinding"]["subjects"]] == [account]


def test_the_command_is_one_that_there_is() -> None:
    (container,) = _pod()["spec"]["containers"]
    name, *words = shlex.split(shlex.join(container["command"]))
    assert name == "baton"
    command: Any = typer.main.get_command(app)
    for word in words[:2]:
        command = command.commands[word]
    command.make_parser(typer.Context(command)).parse_args(args=words[2:])


def test_the_network_lets_it_out_to_kubeflow_and_nobody_in() -> None:
    policy = _component()["NetworkPolicy"]["spec"]
    labels = _pod()["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy
    store = next(
        x for x in yaml.safe_load_all((K8S / "base" / "network.yaml").read_text())
        if x["metadata"]["name"] == "baton-store"
    )["spec"]["podSelector"]["matchExpressions"][0]  # fmt: skip
    assert labels[store["key"]] in store["values"]
