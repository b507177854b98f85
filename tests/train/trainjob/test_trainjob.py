"""A chunk's job is made once, followed, told of, deleted on every way out, and each failure is one message."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from baton.errors import BatonError, ProcessLostError, SkipError, UserError
from baton.recipe import load
from baton.train import trainjob
from baton.train.trainjob import Cluster, Job, Object, labels, owner_reference, train_job
from tests.train.trainjob.job_api import NAMESPACE, JobApi, ended, waiting

SCRATCH = str(Path(__file__).parents[2] / "recipes/scratch.yaml")
RUN = "s3://baton/runs/demo"


def _document(owner: Object | None = None) -> dict[str, Any]:
    return train_job(load.load(SCRATCH, ["resources.nodes=2"]), RUN, 1, owner)


def _job(api: JobApi, *, wait: float = 30, notice: Callable[[], str | None] = lambda: None, owner: str = "") -> Job:
    document = _document(owner_reference("stage", owner) if owner else None)
    return Job(Cluster(api.client(), NAMESPACE), document, labels(RUN, 1), wait=wait, notice=notice)


def _soon(api: JobApi, work: Callable[[], Any]) -> None:
    """Does something once the job has been made and looked at."""

    def watch() -> None:
        until = time.monotonic() + 20
        while not any(verb == "create" for verb, _ in api.requests) or api.looks < 2:
            if time.monotonic() > until:
                return
            time.sleep(0.02)
        work()

    threading.Thread(target=watch, daemon=True).start()


def test_a_job_that_completes(api: JobApi, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    api.pod(0)
    api.pod(1)
    api.logs["job-node-0-0-abcde"] = [
        '::baton {"event": "stage", "at": 1.0, "stage": "train chunk 1", "state": "started"}',
        '::baton {"event": "step", "at": 2.0, "step": 3, "of": 8, "loss": 1.5}',
        "a line of a library",
    ]
    _soon(api, lambda: api.end("Complete"))
    job = _job(api)
    assert job.run() is True
    assert not job.left_early
    assert api.requests == [("create", job.name), ("delete", job.name)]
    told = capfd.readouterr()
    assert told.out.count('"event": "step"') == 1
    assert '"step": 3, "of": 8, "loss": 1.5' in told.out
    assert '"event": "stage"' not in told.out
    assert "a line of a library" in told.err


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_nodes_that_leave_early_say_so(api: JobApi, end: str) -> None:
    """A machine that is preempted may end its job as failed, even if its processes have saved all."""
    api.pod(0)
    api.logs["job-node-0-0-abcde"] = [
        '::baton {"event": "partial", "chunk": 1, "step": 5, "of": 8, "notice": "SIGTERM"}'
    ]
    _soon(api, lambda: api.end(end))
    job = _job(api)
    assert (job.run(), job.left_early) == (True, True)


def test_the_job_of_an_earlier_attempt_is_gone_on_with(api: JobApi) -> None:
    before = _document(owner_reference("stage-of-before", "u-1"))
    api.jobs[before["metadata"]["name"]] = before
    owners = []

    def note() -> None:
        owners.extend(api.jobs[before["metadata"]["name"]]["metadata"]["ownerReferences"])
        api.end("Complete")

    _soon(api, note)
    job = _job(api, owner="u-2")
    assert job.run()
    assert [verb for verb, _ in api.requests] == ["create", "patch", "delete"]
    assert [owner["uid"] for owner in owners] == ["u-2"]


@pytest.mark.parametrize("left", ["other settings", "failed"])
def test_what_an_earlier_attempt_left_otherwise_is_replaced(api: JobApi, left: str) -> None:
    before = _document()
    if left == "failed":
        before["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    else:
        before["metadata"]["name"] = "baton-demo-001-of-before"
    api.jobs[before["metadata"]["name"]] = before
    _soon(api, lambda: api.end("Complete"))
    job = _job(api)
    assert job.run()
    assert api.requests == [("delete", before["metadata"]["name"]), ("create", job.name), ("delete", job.name)]


def test_a_notice_takes_the_job_away(api: JobApi) -> None:
    job = _job(api, notice=lambda: "SIGTERM" if api.looks >= 2 else None)
    assert job.run() is False
    assert api.requests == [("create", job.name), ("delete", job.name)]


def test_an_interruption_takes_the_job_away(api: JobApi) -> None:
    def interrupt() -> str | None:
        raise KeyboardInterrupt

    job = _job(api, notice=interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.run()
    assert api.jobs == {}


def test_a_job_that_somebody_deletes(api: JobApi) -> None:
    _soon(api, api.jobs.clear)
    assert _job(api).run() is False


def _killed(api: JobApi) -> None:
    api.pod(0, "Failed", containerStatuses=ended(1))
    api.pod(1, "Failed", containerStatuses=ended(137, "OOMKilled"))


def _evicted(api: JobApi) -> None:
    api.pod(0, "Failed", containerStatuses=ended(1))
    api.pod(1, "Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage.")


def _disrupted(api: JobApi) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "taint x"}
    api.pod(1, "Failed", conditions=[condition])


def _lost(api: JobApi) -> None:
    api.pod(1, "Unknown", reason="NodeLost", message="Node machine-1 is not responding")


def _error(message: str, exit_code: int) -> str:
    fields = {"event": "error", "stage": "train chunk 1", "message": message, "exit_code": exit_code}
    return f"::baton {json.dumps(fields)}"


def _told(api: JobApi) -> None:
    api.pod(0, "Failed", containerStatuses=ended(2))
    api.logs["job-node-0-0-abcde"] = [_error("no such bucket.", 2)]


def _other_told(api: JobApi) -> None:
    """The first node ends for want of the second, a moment later."""
    api.pod(0, "Failed", containerStatuses=ended(1, at="2026-01-01T00:01:05Z"))
    api.pod(1, "Failed", containerStatuses=ended(1, at="2026-01-01T00:01:00Z"))
    api.logs["job-node-0-0-abcde"] = [_error("connection closed by peer", 1)]
    api.logs["job-node-0-1-abcde"] = [
        "…",
        _error("its disk is full.", 1),
    ]


def _gone(api: JobApi) -> None:
    """The first node is ended, and waited for too long, as the job has failed already."""
    api.pod(0, "Failed", containerStatuses=ended(137, at="2026-01-01T00:03:00Z"))
    api.pod(1, "Failed", containerStatuses=ended(1, at="2026-01-01T00:01:00Z"))
    api.logs["job-node-0-1-abcde"] = [_error("its disk is full.", 1)]


def _shot(api: JobApi) -> None:
    api.pod(0, "Failed", containerStatuses=ended(1, at="2026-01-01T00:01:05Z"))
    api.pod(1, "Failed", containerStatuses=ended(137, at="2026-01-01T00:01:00Z"))
    api.logs["job-node-0-0-abcde"] = [_error("connection closed by peer", 1)]


def _full(api: JobApi) -> None:
    """What a pod takes too much of, the next one would, too; it says more than another's end for want of it."""
    api.pod(0, "Failed", reason="Evicted", message="The node was low on resource: memory.")
    api.pod(1, "Failed", reason="Evicted", message='Usage of EmptyDir volume "shm" exceeds the limit "64Mi".')


def _told_to_end(api: JobApi) -> None:
    api.pod(1, "Failed", containerStatuses=ended(143))


def _parted(api: JobApi) -> None:
    """The first node notices that the second is gone before Kubernetes does."""
    api.pod(0, "Failed", containerStatuses=ended(1))
    api.pod(1)
    fields = {"event": "error", "stage": "train chunk 1", "message": "rank 0 failed: NCCL.", "exit_code": 1}
    api.logs["job-node-0-0-abcde"] = [f"::baton {json.dumps(fields | {'lost': True})}"]


def _spoilt(api: JobApi) -> None:
    """All ranks have found a step to skip, and the first one has written it down."""
    for node in (0, 1):
        api.pod(node, "Failed", containerStatuses=ended(1))
    fields = {"event": "error", "stage": "train chunk 1", "message": "step 7 has the loss nan.", "exit_code": 1}
    api.logs["job-node-0-0-abcde"] = [f"::baton {json.dumps(fields | {'skips': True})}"]


def _without_master(api: JobApi) -> None:
    api.pod(0, "Failed", containerStatuses=ended(1))
    api.logs["job-node-0-0-abcde"] = ["torch.distributed.DistNetworkError: The client socket has timed out"]


def _vanished(api: JobApi) -> None:
    """Its machine was deleted, and with it the pods."""
    api.pod(0)
    api.pod(1)


def _silent(api: JobApi) -> None:
    api.pod(0, "Failed", containerStatuses=ended(3))
    api.logs["job-node-0-0-abcde"] = ["first", "ImportError: libcuda"]


@pytest.mark.parametrize(
    ("befall", "kind", "message"),
    [
        (_killed, BatonError, r"node 1 \(machine-1\) ran out of memory and was killed"),
        (_evicted, ProcessLostError, r"node 1 \(machine-1\) was evicted: The node was low on resource"),
        (_disrupted, ProcessLostError, "node 1 .* was preempted: DeletionByTaintManager: taint x"),
        (_lost, ProcessLostError, "node 1 .* is lost: Node machine-1 is not responding"),
        (_told, UserError, "^no such bucket.$"),
        (_other_told, BatonError, "^its disk is full.$"),
        (_gone, BatonError, "^its disk is full.$"),
        (_shot, ProcessLostError, r"node 1 \(machine-1\) was killed, by the kernel for its memory or with its machine"),
        (_silent, BatonError, r"node 0 .* ended with code 3. Its last lines: first \| ImportError: libcuda$"),
        (_full, BatonError, 'node 1 .* was evicted: Usage of EmptyDir volume "shm" exceeds the limit'),
        (_told_to_end, ProcessLostError, "node 1 .* was killed"),
        (_parted, ProcessLostError, "^rank 0 failed: NCCL.$"),
        (_spoilt, SkipError, "^step 7 has the loss nan.$"),
        (_without_master, ProcessLostError, "node 0 .* ended with code 1. Its last lines: .*DistNetworkError"),
        (_vanished, ProcessLostError, "the TrainJob failed: JobsFailed: it was too slow"),
        (lambda api: None, BatonError, "the TrainJob failed: JobsFailed: it was too slow"),
    ],
)
def test_a_failure_is_one_message(api: JobApi, befall: Callable[[JobApi], None], kind: type, message: str) -> None:
    befall(api)
    _soon(api, lambda: api.end("Failed", "it was too slow"))
    with pytest.raises(BatonError, match=message) as caught:
        _job(api).run()
    assert type(caught.value) is kind
    assert api.jobs == {}


def test_an_image_that_cannot_be_had(api: JobApi) -> None:
    api.pod(0, "Pending", containerStatuses=waiting("ImagePullBackOff", 'Back-off pulling image "img:1"'))
    with pytest.raises(UserError, match=r"the image 'img:1' cannot be pulled on machine-0: ImagePullBackOff. Back-off"):
        _job(api).run()
    assert api.jobs == {}


def test_an_image_that_comes_after_all(api: JobApi) -> None:
    pod = api.pod(0, "Pending", containerStatuses=waiting("ErrImagePull", "registry busy"))
    _soon(api, lambda: (pod.update(status={"phase": "Running"}), time.sleep(0.5), api.end("Complete")))
    assert _job(api).run()


@pytest.mark.parametrize(
    ("pods", "warnings", "message"),
    [
        (
            [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}],
            [],
            "1 of 2 nodes run; node 1: 0/3 nodes: insufficient nvidia.com/gpu",
        ),
        (
            [],
            [{"reason": "FailedCreate", "message": "exceeded quota: baton, requests.nvidia.com/gpu=8"}],
            "0 of 2 nodes run; FailedCreate: exceeded quota: baton",
        ),
        ([], [], "0 of 2 nodes run; no pod was made for it, as where Kubeflow Trainer's controller does not run"),
    ],
    ids=["unschedulable", "quota", "no controller"],
)
def test_nodes_that_do_not_come_in_time(
    api: JobApi,
    caplog: pytest.LogCaptureFixture,
    pods: list[dict[str, Any]],
    warnings: list[dict[str, Any]],
    message: str,
) -> None:
    caplog.set_level(logging.INFO, "baton")
    job = _job(api, wait=0.5)
    if pods:
        api.pod(0)
        api.pod(1, "Pending", conditions=pods)
    api.events = [{**warning, "involvedObject": {"name": f"{job.name}-node-0"}} for warning in warnings]
    with pytest.raises(UserError, match=f"wait_for_nodes is over, 0 s: {message}"):
        job.run()
    assert sum(message in record.getMessage() for record in caplog.records) == 1
    assert api.jobs == {}


@pytest.mark.parametrize(
    ("verb", "status", "answer", "message"),
    [
        ("list", 404, "404 page not found", r"this cluster has no trainjobs.trainer.kubeflow.org/v1alpha1. Install"),
        ("create", 404, "the server could not find the requested resource", "Install Kubeflow Trainer 2.2"),
        ("create", 403, 'trainjobs is forbidden: User "x" cannot create', "account may not create trainjobs in team"),
        ("list", 403, "trainjobs is forbidden", "may not list trainjobs in team: .* Apply k8s/components/trainer"),
        ("create", 403, "exceeded quota: jobs, requested: 1", "the quota of namespace team is used up"),
        (
            "create",
            403,
            'admission webhook "validator.trainjob" denied the request: TrainingRuntime "baton" not found',
            'refuses the TrainJob: .* "baton" not found. resources.runtime names',
        ),
        ("create", 422, "spec.trainer.numNodes: Invalid value", "Kubernetes refuses the TrainJob: spec.trainer.numNod"),
    ],
)
def test_a_refusal_is_one_message(api: JobApi, verb: str, status: int, answer: str, message: str) -> None:
    api.refuse[verb] = (status, answer)
    with pytest.raises(UserError, match=message):
        _job(api).run()
    assert api.requests == []


def test_an_api_server_that_is_away_for_a_moment(api: JobApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainjob, "PATIENCE", 10.0)

    def leave() -> None:
        api.refuse["get"] = (503, "etcd leader changed")
        time.sleep(0.3)
        api.refuse.clear()
        api.end("Complete")

    _soon(api, leave)
    assert _job(api).run()


def test_an_api_server_that_stays_away() -> None:
    gone = Cluster(client.ApiClient(client.Configuration(host="http://127.0.0.1:9")), NAMESPACE)
    job = Job(gone, _document(), labels(RUN, 1), wait=5, notice=lambda: None)
    with pytest.raises(BatonError, match="the API server of Kubernetes cannot be reached"):
        job.run()


def test_one_machine_is_told_so() -> None:
    with pytest.raises(UserError, match="asks for several machines, and this is one"):
        Cluster.here()
