"""A separate namespace on the user's cluster, with what stages need there, and a store that pods reach."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml

from baton.runs.run import Run
from baton.store.storage import Storage

if TYPE_CHECKING:
    from tests.end_to_end.cluster.backend import Backend

HERE = Path(__file__).parent
BATON = str(Path(sys.executable).parent / "baton")
RECIPE = HERE.parents[1] / "recipes" / "scratch.yaml"
MANIFESTS = HERE.parents[2] / "k8s"
STEPS = 40

NEEDED = {
    "KUBECONFIG": "a cluster to make pods in",
    "BATON_IMAGE": "the CPU image, present on the nodes or pullable by them",
    "AWS_ENDPOINT_URL": "an S3 server that the pods reach",
    "AWS_ACCESS_KEY_ID": "its access key",
    "AWS_SECRET_ACCESS_KEY": "its secret key",
}
"""Environment that the tests of pods need. `BATON_CLUSTER_STORE` is the store, `s3://baton` when it is left out."""


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment that leads to cluster, image and store."""
    for name, what in NEEDED.items():
        if not os.environ.get(name):
            pytest.skip(f"{name} is not set: {what}; see make test-cluster")
    return {name: os.environ[name] for name in NEEDED}


@pytest.fixture(scope="session")
def store(environment: dict[str, str]) -> Iterator[str]:
    """A fresh place in the store, removed at the end."""
    import s3fs

    place = f"{os.environ.get('BATON_CLUSTER_STORE', 's3://baton')}/cluster-{uuid.uuid4().hex[:8]}"
    yield place
    with contextlib.suppress(FileNotFoundError):  # nothing came so far as to write
        s3fs.S3FileSystem().rm(place, recursive=True)


@pytest.fixture(scope="session")
def core(environment: dict[str, str]) -> Any:
    """The API server, by the rights of `KUBECONFIG`."""
    from kubernetes import client, config

    config.load_kube_config(environment["KUBECONFIG"])
    return client.CoreV1Api()


@pytest.fixture(scope="session")
def backend(core: Any, environment: dict[str, str], store: str) -> Iterator[Backend]:
    """A namespace with the account of the pods, the store's Secret, and the program that the pods start with."""
    from tests.end_to_end.cluster.backend import Backend
    from tests.end_to_end.cluster.pod_manifest import Place

    loopback = urlsplit(environment["AWS_ENDPOINT_URL"]).hostname in ("127.0.0.1", "localhost", "::1")
    namespace = f"baton-test-{uuid.uuid4().hex[:6]}"
    # A cluster of 1.23 or newer refuses every pod that is not "restricted"; a shared network namespace never is.
    labels = {} if loopback else {"pod-security.kubernetes.io/enforce": "restricted"}
    core.create_namespace({"metadata": {"name": namespace, "labels": labels}})
    try:
        launcher = {"launcher.py": (HERE / "launcher.py").read_text(encoding="utf-8")}
        core.create_namespaced_config_map(namespace, {"metadata": {"name": "launcher"}, "data": launcher})
        keys = {name: environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        core.create_namespaced_secret(namespace, {"metadata": {"name": "store"}, "stringData": keys})
        with _account(core.api_client, namespace):
            place = Place("", f"{store}/artifacts", "baton-runner", "launcher", loopback)
            yield Backend(core, namespace, place)
    finally:
        core.delete_namespace(namespace)


@contextlib.contextmanager
def _account(api: Any, namespace: str) -> Iterator[None]:
    """Gives the pods the account and the rights that `k8s/` gives them, and takes back those outside the namespace."""
    from kubernetes import client, utils

    for path in ("base/accounts.yaml", "components/node-taints/access.yaml"):
        for document in yaml.safe_load_all((MANIFESTS / path).read_text(encoding="utf-8")):
            if document["kind"].startswith("ClusterRole"):
                document["metadata"]["name"] = f"{namespace}-nodes"
            if "roleRef" in document and document["kind"] == "ClusterRoleBinding":
                document["roleRef"]["name"] = f"{namespace}-nodes"
            for subject in document.get("subjects", []):
                subject["namespace"] = namespace
            utils.create_from_dict(api, document, namespace=namespace)
    try:
        yield
    finally:
        rbac = client.RbacAuthorizationV1Api(api)
        rbac.delete_cluster_role_binding(f"{namespace}-nodes")
        rbac.delete_cluster_role(f"{namespace}-nodes")


@pytest.fixture(scope="session")
def settings(environment: dict[str, str], store: str) -> dict[str, Any]:
    """Settings of every run here: 40 steps that take long enough to be disturbed, on one thread."""
    return {
        "store": store,
        "training.epochs": None,
        "training.max_steps": STEPS,
        "training.batch_size": 32,
        "training.micro_batch_size": 1,
        "training.threads": 1,
        "evaluation.every": None,
        "chunks.checkpoint_every": 5,
        "resources.image": environment["BATON_IMAGE"],
        "resources.secret": "store",
        "resources.shm": "256Mi",
        "resources.env": {"AWS_ENDPOINT_URL": environment["AWS_ENDPOINT_URL"], "AWS_REGION": "us-east-1"},
    }


def _options(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


@pytest.fixture(scope="session")
def compiled(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles the recipe, with changes such as `chunks__count=3`."""

    def compile_with(**changes: Any) -> Path:
        package = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
        changed = settings | {name.replace("__", "."): value for name, value in changes.items()}
        image = {"BATON_IMAGE": changed["resources.image"]}  # where it is set, it wins over the recipe
        command = [BATON, "compile", str(RECIPE), "-o", str(package), *_options(changed)]
        subprocess.run(command, check=True, env=os.environ | image)
        return package

    return compile_with


@pytest.fixture(scope="session")
def undisturbed(settings: dict[str, Any], store: str) -> Run:
    """The recipe run in one chunk on this machine, each stage a process, by `baton run`."""
    command = [BATON, "run", str(RECIPE), "--run", "undisturbed", *_options(settings), "--set", "chunks.count=1"]
    subprocess.run(command, check=True)
    return Run(Storage(store), "undisturbed")


@pytest.fixture(autouse=True)
def show_pods(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Prints what became of each pod of a test."""
    yield
    if "backend" not in request.fixturenames:
        return
    backend: Backend = request.getfixturevalue("backend")
    with capsys.disabled():
        print(f"\n{request.node.name}\n{backend.table()}")
    backend.runs.clear()
