"""A chunk on several nodes against a real API server: made, followed, deleted, with the rights of `k8s/`.

Trainer's definition of a TrainJob is put there, and its controllers are played by `train_jobs`. All that the stage does
is done as its own account.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes import client, utils
from kubernetes.client.rest import ApiException

from baton.errors import BatonError, UserError
from baton.kfp import processes
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.train import chunk
from baton.train.chunk import Ending, run_chunk
from baton.train.context import TrainContext
from baton.train.trainjob import Cluster, Job, Object, labels, owner_reference, train_job
from tests.end_to_end.cluster.conftest import MANIFESTS, RECIPE
from tests.end_to_end.cluster.train_jobs import GROUP, Controller
from tests.manifests.trainer_schema import definition

pytestmark = pytest.mark.slow

RUN = "s3://baton/runs/demo"
NO_WAIT = "import sys; print('a line of node', sys.argv[1:])"
FOREVER = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(600)"
"""Ends when it is told to: the first process of a container is not ended by SIGTERM as others are."""


@pytest.fixture(scope="module")
def namespace(core: Any, environment: dict[str, str]) -> Iterator[str]:
    """A namespace with the accounts of stages and nodes, and the store's Secret."""
    name = f"baton-jobs-{uuid.uuid4().hex[:6]}"
    core.create_namespace({"metadata": {"name": name}})
    keys = {key: environment[key] for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    core.create_namespaced_secret(name, {"metadata": {"name": "store"}, "stringData": keys})
    _apply(core.api_client, name, "base/accounts.yaml")
    yield name
    core.delete_namespace(name)


def _apply(api: Any, namespace: str, path: str) -> None:
    for document in yaml.safe_load_all((MANIFESTS / path).read_text(encoding="utf-8")):
        for subject in document.get("subjects", []):
            subject["namespace"] = namespace
        utils.create_from_dict(api, document, namespace=namespace)


@pytest.fixture(scope="module")
def as_stage(core: Any, namespace: str) -> Cluster:
    """The cluster, by the rights of the stages' account."""
    api = client.ApiClient(core.api_client.configuration)
    api.set_default_header("Impersonate-User", f"system:serviceaccount:{namespace}:baton-runner")
    api.set_default_header("Impersonate-Group", "system:serviceaccounts")
    return Cluster(api, namespace)


def _recipe(**changes: Any) -> Recipe:
    settings = {"resources.nodes": 2, "resources.image": os.environ["BATON_IMAGE"], "resources.shm": "64Mi", **changes}
    return load.load(str(RECIPE), [f"{name}={json.dumps(value)}" for name, value in settings.items()])


def _document(program: str, owner: Object | None = None, **changes: Any) -> dict[str, Any]:
    document = train_job(_recipe(**changes), RUN, 1, owner)
    document["spec"]["trainer"] |= {"command": ["python3", "-u", "-c"], "args": [program]}
    document["metadata"]["name"] = f"baton-test-{uuid.uuid4().hex[:8]}"
    return document


def _job(as_stage: Cluster, document: dict[str, Any], notice: Callable[[], str | None] = lambda: None) -> Job:
    return Job(as_stage, document, {"baton/run": document["metadata"]["name"]}, wait=60, notice=notice)


def test_a_cluster_without_trainer(as_stage: Cluster, core: Any) -> None:
    with contextlib.suppress(ApiException):
        client.ApiextensionsV1Api(core.api_client).read_custom_resource_definition("trainjobs.trainer.kubeflow.org")
        pytest.skip("this cluster has TrainJobs already")
    with pytest.raises(UserError) as caught:
        _job(as_stage, _document(NO_WAIT)).run()
    print(caught.value)
    # An account without the right is refused before the kind is looked for; one that has it is told there is none.
    assert "may not list trainjobs" in str(caught.value) or "needs Kubeflow Trainer" in str(caught.value)
    everything = Cluster(core.api_client, as_stage.namespace)
    with pytest.raises(UserError, match=r"needs Kubeflow Trainer, and this cluster has no trainjobs"):
        _job(everything, _document(NO_WAIT)).run()


@pytest.fixture(scope="module")
def trainer(core: Any) -> Iterator[None]:
    """Trainer's TrainJobs, without its controllers; a cluster that has the real ones is left alone."""
    api = client.ApiextensionsV1Api(core.api_client)
    document = definition("TrainJob")
    try:
        try:
            api.create_custom_resource_definition(document)
        except ApiException as error:
            if error.status != 422:
                raise
            print("this server reads a default of '' as null: the definition goes without those")
            api.create_custom_resource_definition(_without_empty_defaults(document))
    except ApiException as error:
        if error.status != 409:
            raise
        pytest.skip("this cluster has Kubeflow Trainer, whose controllers this test would play")
    try:
        _until(lambda: _is_established(api))
        yield
    finally:
        api.delete_custom_resource_definition("trainjobs.trainer.kubeflow.org")


def _without_empty_defaults(schema: Any) -> Any:
    """Returns a definition that Kubernetes 1.20 takes; a key of a list that had such a default is required instead."""
    if isinstance(schema, list):
        return [_without_empty_defaults(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _without_empty_defaults(value) for key, value in schema.items() if (key, value) != ("default", "")}
    if keys := schema.get("x-kubernetes-list-map-keys"):
        found["items"]["required"] = sorted({*keys, *found["items"].get("required", [])})
    return found


def _is_established(api: Any) -> bool:
    found = api.read_custom_resource_definition("trainjobs.trainer.kubeflow.org").status
    return any(x.type == "Established" and x.status == "True" for x in found.conditions or [])


def _until(done: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.5)


def test_without_the_component_the_account_may_not(trainer: None, as_stage: Cluster) -> None:
    with pytest.raises(UserError, match=r"account may not list trainjobs in baton-jobs-\w+: .*Apply k8s/components/tr"):
        _job(as_stage, _document(NO_WAIT)).run()


@pytest.fixture(scope="module")
def controller(trainer: None, core: Any, namespace: str, environment: dict[str, str]) -> Iterator[Controller]:
    """The controllers, and the rights and accounts that `k8s/components/trainer` gives."""
    _apply(core.api_client, namespace, "components/trainer/access.yaml")
    runtime = yaml.safe_load((MANIFESTS / "components" / "trainer" / "runtime.yaml").read_text(encoding="utf-8"))
    loopback = urlsplit(environment["AWS_ENDPOINT_URL"]).hostname in ("127.0.0.1", "localhost", "::1")
    with Controller(core.api_client, namespace, runtime, host_network=loopback) as found:
        yield found


def _there(core: Any, namespace: str) -> list[str]:
    jobs = client.CustomObjectsApi(core.api_client).list_namespaced_custom_object(*GROUP, namespace, "trainjobs")
    pods = core.list_namespaced_pod(namespace, label_selector="jobset.sigs.k8s.io/jobset-name")
    alive = [pod.metadata.name for pod in pods.items if pod.status.phase in ("Pending", "Running")]
    return [job["metadata"]["name"] for job in jobs["items"]] + alive


def test_the_server_refuses_what_its_schema_refuses(controller: Controller, as_stage: Cluster) -> None:
    document = _document(NO_WAIT)
    document["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(UserError, match=r"Kubernetes refuses the TrainJob: .*numNodes"):
        _job(as_stage, document).run()


def test_a_job_that_completes_leaves_nothing(
    controller: Controller, as_stage: Cluster, core: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import os, time; print('node', os.environ['PET_NODE_RANK'], 'of', os.environ['PET_NNODES']); time.sleep(5)"
    )
    assert _job(as_stage, _document(program)).run() is True
    assert capsys.readouterr().err.count("node 0 of 2") == 1
    assert _there(core, controller.namespace) == []


def test_a_node_that_fails_says_why(controller: Controller, as_stage: Cluster, core: Any) -> None:
    fields = {"event": "error", "stage": "train chunk 1", "message": "no such bucket.", "exit_code": 2}
    said = f"print('::baton ' + json.dumps({fields}))"
    program = f"import json, os, sys, time\nif os.environ['PET_NODE_RANK'] == '1':\n {said}\n sys.exit(2)\n{FOREVER}"
    with pytest.raises(UserError, match=r"^no such bucket.$"):
        _job(as_stage, _document(program)).run()
    assert _there(core, controller.namespace) == []


def test_a_node_that_is_killed(controller: Controller, as_stage: Cluster, core: Any) -> None:
    program = f"import os\nif os.environ['PET_NODE_RANK'] == '1': os._exit(137)\n{FOREVER}"
    with pytest.raises(
        BatonError, match=r"node 1 \(\S+\) was killed, by the kernel for its memory or with its machine"
    ):
        _job(as_stage, _document(program)).run()
    assert _there(core, controller.namespace) == []


def test_a_node_that_takes_more_memory_than_it_may(controller: Controller, as_stage: Cluster, core: Any) -> None:
    program = "import os, time\nif os.environ['PET_NODE_RANK'] == '1': b'x' * 2**30\ntime.sleep(30)"
    document = _document(program, **{"resources.memory": "100Mi"})
    caught: list[BatonError] = []
    try:
        _job(as_stage, document).run()
    except BatonError as error:
        caught.append(error)
    assert _there(core, controller.namespace) == []
    if not caught:
        pytest.skip("this cluster's nodes do not enforce limits of memory")
    assert re.match(r"node 1 \(\S+\) ran out of memory and was killed: raise resources.memory", str(caught[0]))


def test_an_image_that_is_not_there(
    controller: Controller, as_stage: Cluster, core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.train.trainjob.IMAGE_PATIENCE", 5.0)
    document = _document(NO_WAIT, **{"resources.image": "localhost:1/nobody/made-this:1"})
    with pytest.raises(
        UserError, match=r"the image 'localhost:1/nobody/made-this:1' cannot be pulled on \S+: (Err|Image)"
    ):
        _job(as_stage, document).run()
    assert _there(core, controller.namespace) == []


def test_nodes_without_room(controller: Controller, as_stage: Cluster, core: Any) -> None:
    document = _document(NO_WAIT, **{"resources.gpus": 64, "training.batch_size": 256})
    job = Job(as_stage, document, {"baton/run": "x"}, wait=15, notice=lambda: None)
    with pytest.raises(UserError, match=r"wait_for_nodes is over, 15 s: 0 of 2 nodes run; node 0: .*nvidia.com/gpu"):
        job.run()
    assert _there(core, controller.namespace) == []


def test_a_notice_takes_the_nodes_away(controller: Controller, as_stage: Cluster, core: Any) -> None:
    document = _document(FOREVER)
    asked = lambda: "SIGTERM" if _running(controller, document["metadata"]["name"]) == 2 else None  # noqa: E731
    assert _job(as_stage, document, asked).run() is False
    assert _there(core, controller.namespace) == []


def _running(controller: Controller, name: str) -> int:
    return sum(pod.status.phase == "Running" for pod in controller.pods(name))


def test_a_stage_that_vanishes_leaves_nothing(controller: Controller, as_stage: Cluster, core: Any) -> None:
    """Its pod is deleted, and it never had a chance to clean up: Kubernetes does, by the owner."""
    pod = core.create_namespaced_pod(controller.namespace, _stage_pod())
    document = _document(FOREVER, owner_reference(pod.metadata.name, pod.metadata.uid))
    assert as_stage.create(document)
    _until(lambda: _running(controller, document["metadata"]["name"]) == 2, 120)
    core.delete_namespaced_pod(pod.metadata.name, controller.namespace, grace_period_seconds=0)
    _until(lambda: _there(core, controller.namespace) == [], 180)


def test_the_next_attempt_goes_on_with_the_job(controller: Controller, as_stage: Cluster, core: Any) -> None:
    first, second = (core.create_namespaced_pod(controller.namespace, _stage_pod()) for _ in range(2))
    document = _document("import time; time.sleep(45)", owner_reference(first.metadata.name, first.metadata.uid))
    assert as_stage.create(document)
    name = document["metadata"]["name"]
    _until(lambda: _running(controller, name) == 2, 120)
    before = {pod.metadata.uid for pod in controller.pods(name)}
    document["metadata"]["ownerReferences"] = [owner_reference(second.metadata.name, second.metadata.uid)]
    seen: set[str] = set()

    def look() -> str | None:
        if not seen:  # taken over: the end of the first attempt's pod no longer counts
            core.delete_namespaced_pod(first.metadata.name, controller.namespace, grace_period_seconds=0)
        seen.update(pod.metadata.uid for pod in controller.pods(name))
        return None

    assert _job(as_stage, document, look).run() is True
    assert seen == before
    core.delete_namespaced_pod(second.metadata.name, controller.namespace, grace_period_seconds=0)


def _stage_pod() -> dict[str, Any]:
    container = {"name": "main", "image": os.environ["BATON_IMAGE"], "command": ["python3", "-c", FOREVER]}
    return {"metadata": {"name": f"stage-{uuid.uuid4().hex[:6]}"}, "spec": {"containers": [container]}}


def test_two_nodes_train_a_chunk(
    controller: Controller,
    as_stage: Cluster,
    core: Any,
    store: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both chunks, each a job of two pods that meet by gloo; the run is that of two processes on this machine."""
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    few = settings | {
        "training.max_steps": 8,
        "training.batch_size": 8,
        "training.micro_batch_size": 2,
        "chunks.count": 2,
    }
    digests = {}
    for name, changes in (("nodes", {"resources.nodes": 2}), ("processes", {"training.parallel.processes": 2})):
        overrides = [f"{key}={json.dumps(value)}" for key, value in (few | changes).items()]
        run = processes.prepare(load.load(str(RECIPE), overrides), name, lambda event: None)
        for index in (1, 2):
            capsys.readouterr()
            context = TrainContext.open(run.uri, index)
            outcome = chunk.run_trainjob(context, None, as_stage) if name == "nodes" else run_chunk(run.uri, index)
            assert outcome
            assert outcome.ending is Ending.DONE
            if name == "nodes":
                told = capsys.readouterr().out
                assert told.count('"event": "step"') == 4
                assert told.count('"event": "checkpoint"') >= 1
        digests[name] = _chain(run)
    assert _there(core, controller.namespace) == []
    assert digests["nodes"] == digests["processes"]


def _chain(run: Run) -> list[str]:
    from baton.checkpoint.store import CheckpointStore

    return [checkpoint.digest for checkpoint in CheckpointStore(run).committed()]


def test_labels_find_all_jobs_of_a_chunk(controller: Controller, as_stage: Cluster) -> None:
    document = train_job(_recipe(), RUN, 7, None)
    document["spec"]["trainer"] |= {"command": ["python3", "-c"], "args": [FOREVER]}
    assert as_stage.create(document)
    assert not as_stage.create(document)
    assert [job["metadata"]["name"] for job in as_stage.jobs(labels(RUN, 7))] == [document["metadata"]["name"]]
    assert as_stage.jobs(labels(RUN, 8)) == []
    assert as_stage.delete(document["metadata"]["name"])
    _until(lambda: as_stage.job(document["metadata"]["name"]) is None)
    assert not as_stage.delete(document["metadata"]["name"])
