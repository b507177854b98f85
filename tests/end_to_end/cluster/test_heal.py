"""`components/heal` as a CronJob of a real cluster, with its own rights alone, against the model of Kubeflow's API.

The model asks the cluster, as Kubeflow does, whose token a request carries and what that account may do.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from baton.runs.run import Run
from baton.store.storage import Storage
from tests.support.kfp_api import KfpApi
from tests.support.kfp_checks import ApiError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMPONENT = ROOT / "k8s" / "components" / "heal"
LOST = ROOT / "tests" / "assets" / "kubeflow-2.17" / "pod-lost-failed.json.gz"
VERBS = [  # method, path, resource and verb that Kubeflow asks the cluster about
    ("GET", r"/apis/v2beta1/runs", "runs", "list"),
    ("GET", r"/apis/v\dbeta1/runs/[^/:]+", "runs", "get"),
    ("POST", r"/apis/v2beta1/runs", "runs", "create"),
    ("POST", r"/apis/v2beta1/runs/[^/]+:retry", "runs", "retry"),
    ("POST", r"/apis/v2beta1/runs/[^/]+:terminate", "runs", "terminate"),
    ("GET", r"/apis/v2beta1/pipelines/.+", "pipelines", "get"),
]


def _kubectl(*arguments: str, given: Any = None) -> str:
    done = subprocess.run(["kubectl", *arguments], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _review(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    group = "authentication" if kind == "TokenReview" else "authorization"
    review = {"apiVersion": f"{group}.k8s.io/v1", "kind": kind, "spec": spec}
    status: dict[str, Any] = json.loads(_kubectl("create", "-o", "json", "-f", "-", given=review))["status"]
    return status


@pytest.fixture
def namespace(environment: dict[str, str]) -> Iterator[str]:
    """A namespace with a Secret of the store."""
    if urlsplit(environment["AWS_ENDPOINT_URL"]).hostname not in ("127.0.0.1", "localhost"):
        pytest.skip("pods reach the model of the API only where they share this machine's network")
    name = f"baton-heal-{uuid.uuid4().hex[:8]}"
    _kubectl("create", "namespace", name)
    keys = [f"--from-literal={key}={environment[key]}" for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    _kubectl("create", "secret", "generic", "baton-store", "-n", name, *keys)
    yield name
    _kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def api(namespace: str) -> Iterator[KfpApi]:
    """The model, which lets in whom the cluster knows, and grants what it grants."""

    def authorize(method: str, path: str, authorization: str) -> None:
        asked = [each[2:] for each in VERBS if each[0] == method and re.fullmatch(each[1], path)]
        if not asked:
            assert path.endswith("/healthz"), (method, path)
            return
        token = authorization.removeprefix("Bearer ")
        user = _review("TokenReview", {"token": token, "audiences": ["pipelines.kubeflow.org"]})
        if not user.get("authenticated"):
            raise ApiError(401, "Unauthenticated: Review.Status.Authenticated is false")
        resource, verb = asked[0]
        attributes = {"group": "pipelines.kubeflow.org", "resource": resource, "verb": verb, "namespace": namespace}
        who = {"user": user["user"]["username"], "groups": user["user"]["groups"], "resourceAttributes": attributes}
        if not _review("SubjectAccessReview", who)["allowed"]:
            raise ApiError(403, f"User {who['user']!r} is not authorized with reason: {verb} {resource}")

    with KfpApi() as made:
        made.registry.multi_user = True
        made.authorize = authorize
        yield made


def _component(namespace: str, image: str, settings: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the component's objects for a namespace; CronJobs have another version before Kubernetes 1.21."""
    found = {}
    for path in COMPONENT.glob("[!k]*.yaml"):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            document["metadata"]["namespace"] = namespace
            for subject in document.get("subjects", []):
                subject["namespace"] = namespace
            found[document["kind"]] = document
    found["ConfigMap"]["data"] |= settings
    newest = json.loads(_kubectl("get", "--raw", "/apis/batch/v1"))["resources"]
    if not any(resource["name"] == "cronjobs" for resource in newest):
        found["CronJob"]["apiVersion"] = "batch/v1beta1"
    pod = found["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    pod["hostNetwork"] = True
    pod["containers"][0] |= {"image": image, "imagePullPolicy": "IfNotPresent"}
    return found


def _until(look: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + 180
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(1)
    raise AssertionError(f"{what} did not come within 180 s")


def _ended(namespace: str) -> dict[str, tuple[str, str]]:
    """Returns phase and output of each pod that has ended."""
    pods = json.loads(_kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    names = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in pods}
    return {
        name: (phase, _kubectl("logs", "-n", namespace, name))
        for name, phase in names.items()
        if phase in ("Succeeded", "Failed")
    }


def test_a_cron_job_heals_with_the_rights_of_its_account_alone(
    namespace: str, api: KfpApi, environment: dict[str, str], store: str
) -> None:
    with gzip.open(LOST) as file:
        recording = json.load(file)
    recording["run"].setdefault("runtime_config", {}).setdefault("parameters", {})["store"] = store
    lost = api.add_recorded(recording["run"], recording["workflow"], {})
    retry = ("POST", f"/apis/v2beta1/runs/{lost}:retry")
    settings = {"BATON_KFP_ENDPOINT": api.url, "AWS_ENDPOINT_URL": environment["AWS_ENDPOINT_URL"]}
    objects = _component(namespace, environment["BATON_IMAGE"], settings)
    binding = objects.pop("RoleBinding")
    command = objects["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["command"]
    command.append("--within=1e6")  # the recording is old
    _kubectl("create", "-f", "-", given={"apiVersion": "v1", "kind": "List", "items": list(objects.values())})

    refused = _until(lambda: _ended(namespace), "the first job")
    ((phase, output),) = refused.values()
    assert phase == "Failed", output
    assert "list runs" in output
    assert retry not in api.requests

    _kubectl("create", "-f", "-", given=binding)
    healed = _until(lambda: {k: v for k, v in _ended(namespace).items() if k not in refused}, "the second job")
    ((phase, output),) = healed.values()
    print(output)
    assert phase == "Succeeded", output
    assert f"lost ({lost}): started again: train chunk 2 was lost" in output
    assert api.requests.count(retry) == 1
    (loss,) = Run(Storage(store), "lost").lost_pods()
    assert (loss.stage, loss.number) == ("train chunk 2", 1)
    assert len(Storage(store).list(f"heals/{lost}")) == 1
