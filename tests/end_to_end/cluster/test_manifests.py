"""What a real API server says to the manifests: a dry run of every object, and who may do what once they are there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.manifests.building import CUSTOM_KINDS, OVERLAYS, objects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server_minor() -> int:
    """The cluster's minor version."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: a cluster to try the manifests on; see make test-cluster")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: https://kubernetes.io/docs/tasks/tools")
    version = json.loads(_kubectl("version", "-o", "json").stdout)["serverVersion"]["minor"]
    return int("".join(filter(str.isdigit, version)))


@pytest.fixture
def namespace(server_minor: int) -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"baton-manifests-{uuid.uuid4().hex[:8]}"
    assert _kubectl("create", "namespace", name).returncode == 0
    yield name
    _kubectl("delete", "namespace", name, "--wait=false")


def _kubectl(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True)


def _moved(document: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Returns an object as it would be in another namespace, cluster-wide ones under another name."""
    text = yaml.safe_dump(document)
    if "namespace" in document["metadata"]:
        text = text.replace(f"namespace: {document['metadata']['namespace']}", f"namespace: {namespace}")
    moved: dict[str, Any] = yaml.safe_load(text)
    return moved


def _too_new(document: dict[str, Any], minor: int) -> str | None:
    """Returns why a cluster of this version cannot know an object."""
    if document["kind"] in CUSTOM_KINDS:
        return "a custom resource, whose operator is not installed"
    since = {"PodDisruptionBudget": 21, "MutatingAdmissionPolicy": 36, "MutatingAdmissionPolicyBinding": 36}
    if minor < since.get(document["kind"], 0):
        return f"in this version since Kubernetes 1.{since[document['kind']]}"
    return None


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_takes_each_object(overlay: str, namespace: str, server_minor: int) -> None:
    tried = []
    for document in objects(overlay):
        if reason := _too_new(document, server_minor):
            print(f"{overlay}: {document['kind']}/{document['metadata']['name']} is not tried: {reason}")
        else:
            tried.append(_moved(document, namespace))
    everything = {"apiVersion": "v1", "kind": "List", "items": tried}
    asked = _kubectl("create", "--dry-run=server", "-o", "name", "-f", "-", given=json.dumps(everything))
    assert asked.returncode == 0, asked.stderr
    print(f"{overlay}: {len(tried)} objects taken by Kubernetes 1.{server_minor}")
    assert len(asked.stdout.splitlines()) == len(tried) >= 17


def test_the_dry_run_is_a_real_check(namespace: str) -> None:
    """No schema says that services have no priority class to be counted by; the server does."""
    quota = next(x for x in objects("spot") if x["kind"] == "ResourceQuota")
    wrong = _moved({**quota, "spec": {**quota["spec"], "hard": {"services": "1"}}}, namespace)
    asked = _kubectl("create", "--dry-run=server", "-f", "-", given=json.dumps(wrong))
    assert asked.returncode != 0
    assert "unsupported scope applied to resource" in asked.stderr


MAY = {
    ("get", "", "configmaps", "kfp-launcher"): True,
    ("get", "", "secrets", "baton-store"): True,
    ("get", "", "pods", "any"): True,
    ("create", "argoproj.io", "workflowtaskresults", ""): True,
    ("patch", "argoproj.io", "workflowtaskresults", "any"): True,
    ("get", "", "configmaps", "others"): False,
    ("get", "", "secrets", "hub-of-another-run"): False,
    ("list", "", "secrets", ""): False,
    ("create", "", "pods", ""): False,
    ("create", "", "pods/exec", "any"): False,
    ("delete", "", "pods", "any"): False,
    ("get", "argoproj.io", "workflows", "any"): False,
    ("get", "", "nodes", "any"): False,
}
"""(verb, group, resource, name) → whether the account of stages has that right."""


def _review(account: str, namespace: str, verb: str, group: str, resource: str, name: str) -> bool:
    kind, _, part = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": kind, "subresource": part, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": account, "resourceAttributes": attributes | {"namespace": namespace}},
    }
    asked = _kubectl("create", "-o", "json", "-f", "-", given=json.dumps(review))
    return bool(json.loads(asked.stdout)["status"]["allowed"])


def test_the_account_of_stages_may_do_no_more_than_it_needs(namespace: str) -> None:
    for document in objects("spot"):
        if document["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            made = _kubectl("create", "-f", "-", given=json.dumps(_moved(document, namespace)))
            assert made.returncode == 0, made.stderr
    account = f"system:serviceaccount:{namespace}:baton-runner"
    assert {question: _review(account, namespace, *question) for question in MAY} == MAY
    assert not _review(account, "default", "get", "", "secrets", "baton-store")
