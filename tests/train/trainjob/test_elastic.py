"""A chunk's job has as many nodes as the cluster gives, and another one follows where nodes were lost."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train import chunk, supervisor, trainjob
from baton.train.chunk import Ending, Outcome
from baton.train.trainjob import Cluster, owner_reference, train_job
from tests.train.chunks import first_chunk
from tests.train.trainjob.job_api import NAMESPACE, JobApi, ended, waiting

SCRATCH = str(Path(__file__).parents[2] / "recipes/scratch.yaml")
RUN = "s3://baton/runs/demo"
NO_ROOM = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}]


def _recipe(*overrides: str) -> Recipe:
    nodes = "resources.nodes={min: 1, max: 4, patience: 1s}"
    return load.load(SCRATCH, [nodes, "training.parallel.virtual_workers=4", *overrides])


def _run(api: JobApi, *overrides: str, notice: Callable[[], str | None] = lambda: None) -> tuple[int, bool]:
    """Follows a chunk's jobs; returns how many nodes the last one had, and whether it ended by itself."""
    job, by_itself = trainjob.run_job(Cluster(api.client(), NAMESPACE), _recipe(*overrides), RUN, 1, notice)
    return job.nodes, by_itself


class Machines:
    """Makes the pods of a job as far as there is room; a job that has all of its own is complete at once.

    Attributes:
        room: How many nodes there is room for.
        befall: Done to the job that has all of its pods, by its number; it is complete where there is nothing.
        jobs: How many nodes each job had, in order.
    """

    def __init__(self, api: JobApi, room: int, befall: dict[int, Callable[[], None]] | None = None) -> None:
        self.api, self.room, self.befall = api, room, befall or {}
        self.jobs: list[int] = []
        self._had = 0
        api.on_create = self.make

    def make(self, job: dict[str, Any]) -> None:
        """Makes the pods of a job."""
        nodes = job["spec"]["trainer"]["numNodes"]
        self.jobs.append(nodes)
        for index in range(nodes):
            if index < self.room:
                self.api.pod(index)
            else:
                self.api.pod(index, "Pending", conditions=NO_ROOM)["spec"] = {}
        if nodes <= self.room:
            self._had += 1
            self.befall.get(self._had, lambda: self.api.end("Complete"))()


def _lost(api: JobApi) -> None:
    api.pods[-1]["status"] = {"phase": "Failed", "reason": "NodeLost", "message": "its machine was preempted"}
    api.end("Failed")


def test_where_there_is_room_all_nodes_train(api: JobApi) -> None:
    machines = Machines(api, room=4)
    assert _run(api) == (4, True)
    assert machines.jobs == [4]


def test_where_there_is_less_room_fewer_train(api: JobApi, caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(api, room=2)
    assert _run(api) == (2, True)
    assert machines.jobs == [4, 2]
    assert [verb for verb, _ in api.requests] == ["create", "delete"] * 2
    assert len({name for _, name in api.requests}) == 1
    told = r"4 nodes could not be had \(2 of 4 nodes run; node 2: 0/3 nodes: .*\); going on with 2$"
    assert sum(bool(re.search(told, record.getMessage())) for record in caplog.records) == 1


def test_a_quota_that_refuses_pods(api: JobApi, caplog: pytest.LogCaptureFixture) -> None:
    def make(job: dict[str, Any]) -> None:
        if job["spec"]["trainer"]["numNodes"] == 2:
            api.pod(0)
            api.pod(1)
            api.end("Complete")
            return
        name = f"{job['metadata']['name']}-node-0"
        api.events = [
            {"reason": "FailedCreate", "message": "exceeded quota: gpus", "involvedObject": {"name": name}},
        ]

    api.on_create = make
    assert _run(api) == (2, True)
    assert "0 of 4 nodes run; FailedCreate: exceeded quota: gpus); going on with 2" in caplog.text


def test_a_quota_that_refuses_the_job(api: JobApi, caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(api, room=4)
    few = lambda job: job["spec"]["trainer"]["numNodes"] > 1  # noqa: E731
    api.admit = lambda job: (403, "exceeded quota: gpus, requested: 8") if few(job) else None
    assert _run(api) == (1, True)
    assert machines.jobs == [1]
    assert caplog.text.count("could not be had (the quota of namespace team is used up") == 2


def test_a_quota_that_refuses_any_job(api: JobApi) -> None:
    api.admit = lambda job: (403, "exceeded quota: jobs, requested: 1")
    with pytest.raises(UserError, match="the quota of namespace team is used up"):
        _run(api, "resources.wait_for_nodes=1s")
    assert api.jobs == {}


def test_the_fewest_are_waited_for_as_long_as_ever(api: JobApi) -> None:
    machines = Machines(api, room=0)
    with pytest.raises(UserError, match="wait_for_nodes is over, 2 s: 0 of 1 nodes run; node 0: 0/3 nodes"):
        _run(api, "resources.wait_for_nodes=2s")
    assert machines.jobs == [4, 2, 1]
    assert api.jobs == {}


def test_a_bound_is_kept(api: JobApi) -> None:
    machines = Machines(api, room=1)
    bounds = "resources.nodes={min: 2, max: 3, patience: 1s}"
    with pytest.raises(UserError, match="wait_for_nodes is over, 1 s: 1 of 2 nodes run"):
        _run(api, bounds, "resources.wait_for_nodes=1s")
    assert machines.jobs == [2], "3 does not divide 4 workers"


def test_a_queue_is_nobodys_fault(api: JobApi) -> None:
    """It is waited in for longer than patience, and then all are let in."""

    def let_in() -> None:
        for index in range(4):
            api.pod(index)
        api.end("Complete")

    def make(job: dict[str, Any]) -> None:
        job["status"] = {"conditions": [{"type": "Suspended", "status": "True", "message": "queue full"}]}
        threading.Timer(2.0, let_in).start()

    api.on_create = make
    assert _run(api) == (4, True)
    assert [verb for verb, _ in api.requests] == ["create", "delete"]


def test_an_image_that_takes_its_time_is_no_want_of_room(api: JobApi) -> None:
    """It is waited for longer than patience: all pods have their machines."""

    def make(job: dict[str, Any]) -> None:
        for index in range(4):
            api.pod(index, "Pending")
        threading.Timer(2.0, lambda: api.end("Complete")).start()

    api.on_create = make
    assert _run(api) == (4, True)
    assert [verb for verb, _ in api.requests] == ["create", "delete"]


def test_an_image_that_cannot_be_had_is_a_users_error(api: JobApi) -> None:
    statuses = waiting("ImagePullBackOff", "Back-off pulling image")
    api.on_create = lambda job: [api.pod(index, "Pending", containerStatuses=statuses) for index in range(4)]
    with pytest.raises(UserError, match="the image 'img:1' cannot be pulled on machine-0"):
        _run(api)
    assert [verb for verb, _ in api.requests] == ["create", "delete"]


def test_a_notice_while_nodes_are_waited_for(api: JobApi) -> None:
    machines = Machines(api, room=0)
    assert _run(api, notice=lambda: "SIGTERM" if api.looks > 2 else None) == (4, False)
    assert machines.jobs == [4]
    assert api.jobs == {}


@pytest.mark.parametrize("nodes", [4, 2, 1])
def test_a_job_that_trains_is_followed_whatever_its_number(
    nodes: int, api: JobApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = train_job(_recipe(), RUN, 1, owner_reference("stage-1", "u-1"), nodes)
    api.jobs[left["metadata"]["name"]] = dict(left)
    for index in range(nodes):
        api.pod(index)
    monkeypatch.setenv("KFP_POD_NAME", "stage-2")
    monkeypatch.setenv("KFP_POD_UID", "u-2")
    seen = []

    def look() -> None:
        seen.append(api.jobs[left["metadata"]["name"]]["metadata"]["ownerReferences"][0]["uid"])
        api.end("Complete")

    assert _run(api, notice=lambda: look()) == (nodes, True)  # type: ignore[func-returns-value]
    assert [verb for verb, _ in api.requests] == ["create", "patch", "delete"], "none is deleted before"
    assert seen == ["u-2"]


def test_a_job_with_a_number_that_is_not_possible_is_replaced(api: JobApi) -> None:
    left = train_job(_recipe(), RUN, 1, None, 3)
    api.jobs[left["metadata"]["name"]] = dict(left)
    Machines(api, room=4)
    assert _run(api) == (4, True)
    assert [verb for verb, _ in api.requests] == ["delete", "create", "delete"]


def test_a_job_that_waits_with_fewer_nodes_takes_fewer_still(api: JobApi) -> None:
    left = train_job(_recipe(), RUN, 1, None, 2)
    api.jobs[left["metadata"]["name"]] = dict(left)
    machines = Machines(api, room=1)
    assert _run(api) == (1, True)
    assert machines.jobs == [1]


def test_pods_of_the_job_before_count_for_nothing(api: JobApi) -> None:
    """One stays where its machine is lost; the next job's own error is the one that is told."""
    stays = api.pod(0, "Unknown", reason="NodeLost")
    stays["metadata"] |= {"name": "job-node-0-0-before", "deletionTimestamp": "2026-01-01T00:00:00Z"}

    def make(job: dict[str, Any]) -> None:
        for index in range(4):
            api.pod(index, "Failed", containerStatuses=ended(3))
        api.end("Failed")

    api.on_create = make
    with pytest.raises(BatonError, match=r"node 0 \(machine-0\) ended with code 3"):
        _run(api)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose jobs follow each other at once."""
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)
    made = Run(Storage(str(tmp_path / "store")), "demo")
    made.create(_recipe())
    return made


def _stage(api: JobApi, run: Run) -> Outcome:
    """Runs the stage of a chunk as its pod does: each job is followed by a process of its own."""

    def train(run_uri: str, index: int) -> Outcome:
        cluster = Cluster(api.client(), NAMESPACE)
        return chunk.run_trainjob(replace(first_chunk(Run.open(run_uri)), index=index), None, cluster)

    return supervisor.run(run.uri, 1, train)


def _follow(api: JobApi, run: Run) -> Outcome:
    """Runs it as far as its jobs go, as nodes that are none commit nothing."""

    def train(run_uri: str, index: int) -> Outcome:
        trainjob.run_job(Cluster(api.client(), NAMESPACE), _recipe(), run_uri, index, lambda: None)
        return Outcome(Ending.DONE, run_uri)

    return supervisor.run(run.uri, 1, train)


def test_after_a_loss_fewer_train_and_then_more(api: JobApi, run: Run) -> None:
    machines = Machines(api, room=4)

    def lose(left: int) -> Callable[[], None]:
        def lose() -> None:
            _lost(api)
            machines.room = left

        return lose

    machines.befall = {1: lose(2), 2: lose(4)}
    assert _follow(api, run).ending is Ending.DONE
    assert machines.jobs == [4, 4, 2, 4]
    assert [restart.reason for restart in run.restarts()] == [
        "node 3 (machine-3) is lost: its machine was preempted.",
        "node 1 (machine-1) is lost: its machine was preempted.",
    ]


def test_losses_without_end_are_a_failure(api: JobApi, run: Run) -> None:
    machines = Machines(api, room=4, befall=dict.fromkeys(range(1, 9), lambda: _lost(api)))
    with pytest.raises(BatonError, match=r"node 3 .* is lost"):
        _follow(api, run)
    assert machines.jobs == [4] * 3, "chunks.retries is 2"


def _users(api: JobApi) -> None:
    api.pods[0]["status"] = {"phase": "Failed", "containerStatuses": ended(2)}
    error = '{"event": "error", "stage": "train chunk 1", "message": "no such bucket.", "exit_code": 2}'
    api.logs["job-node-0-0-abcde"] = [f"::baton {error}"]
    api.end("Failed")


def _out_of_memory(api: JobApi) -> None:
    api.pods[1]["status"] = {"phase": "Failed", "containerStatuses": ended(137, "OOMKilled")}
    api.end("Failed")


@pytest.mark.parametrize(
    ("befall", "message"), [(_users, "^no such bucket.$"), (_out_of_memory, "node 1 .* ran out of memory")]
)
def test_what_another_job_would_fail_of_too_is_not_tried_again(
    befall: Callable[[JobApi], None], message: str, api: JobApi, run: Run
) -> None:
    machines = Machines(api, room=4, befall={1: lambda: befall(api)})
    with pytest.raises(BatonError, match=message):
        _follow(api, run)
    assert machines.jobs == [4]


def _preempted(api: JobApi) -> None:
    told = '::baton {"event": "partial", "chunk": 1, "step": 5, "of": 8, "notice": "SIGTERM"}'
    api.logs["job-node-0-0-abcde"] = [told]
    api.end("Complete")


def test_nodes_that_leave_early_are_followed_by_others(api: JobApi, run: Run) -> None:
    """And where they leave each time, the next chunk resumes."""
    machines = Machines(api, room=4, befall=dict.fromkeys(range(1, 9), lambda: _preempted(api)))
    outcome = _stage(api, run)
    assert outcome.ending is Ending.PARTIAL
    assert machines.jobs == [4] * 3
    assert len(run.restarts()) == 2


def test_nodes_of_a_fixed_number_that_leave_early_are_followed_by_the_next_chunk(api: JobApi, tmp_path: Path) -> None:
    fixed = Run(Storage(str(tmp_path / "fixed")), "demo")
    fixed.create(_recipe("resources.nodes=2"))
    machines = Machines(api, room=4, befall={1: lambda: _preempted(api)})
    assert _stage(api, fixed).ending is Ending.PARTIAL
    assert machines.jobs == [2]
