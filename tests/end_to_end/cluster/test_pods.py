"""The compiled pipeline as pods on a real cluster: undisturbed, and with pods and nodes removed under it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.runs.run import Run
from baton.store.storage import Storage

if TYPE_CHECKING:
    from tests.end_to_end.cluster.backend import Backend, PipelineRun

pytestmark = pytest.mark.slow

GATE = {"perplexity": "<= baseline * 1000"}
LATER = ("evaluate", "export", "report")
"""Left out where the chunks are what is disturbed."""

TAINT = {"key": "baton/leaving", "effect": "NoSchedule"}


def _final(run: Run) -> CheckpointMeta:
    """Returns what the manifest of the newest checkpoint says."""
    newest = next(CheckpointStore(run).committed())
    assert newest.step == run.plan().num_steps
    return newest.meta


def _assert_same_bits(run: Run, undisturbed: Run) -> None:
    ours, theirs = _final(run), _final(undisturbed)
    assert ours.state == theirs.state, ours.fingerprint.differences(theirs.fingerprint)


def _chunks(run: Run) -> list[tuple[int, str, int]]:
    attempts = [attempt for attempt in run.attempts() if attempt.outcome != "killed"]
    return [(attempt.chunk, attempt.outcome, attempt.to_step) for attempt in attempts]


def test_pods_end_on_the_bits_of_one_process(
    backend: Backend, compiled: Callable[..., Path], store: str, undisturbed: Run
) -> None:
    started = backend.start(compiled(chunks__count=3, evaluation__gate=GATE), run_name="whole")
    run = Run(Storage(store), "whole")
    model = started.result()["Output"]
    _assert_same_bits(run, undisturbed)
    assert model == run.require("export.json")["model_uri"]
    assert _chunks(run) == [(1, "done", 14), (2, "done", 27), (3, "done", 40)]
    assert {attempt.task for attempt in started.attempts} == {
        *("data split", "tokenize", "train chunk 1", "train chunk 2", "train chunk 3"),
        *("checkpoint 1", "checkpoint 2", "checkpoint 3", "evaluate", "gate", "export", "report"),
    }
    assert started.of("checkpoint 1")[0].began < started.of("train chunk 2")[0].seen
    assert started.of("train chunk 2")[0].began < started.of("checkpoint 1")[0].seen
    artifacts = Storage(started.place.root)
    page = artifacts.read(f"{started.place.run_id}/report-0/report")
    assert page == run.storage.read(run.path("report.html"))


@pytest.mark.parametrize("seed", [1, 2])
def test_pods_deleted_at_any_moment_and_their_tasks_started_again(
    seed: int, backend: Backend, compiled: Callable[..., Path], store: str, undisturbed: Run
) -> None:
    """With `OnError`, as KFP's manifests set it, the run resumes by itself."""
    draw, name = random.Random(seed), f"deleted-{seed}"
    started = backend.start(compiled(chunks__count=2), retry_policy="OnError", leave_out=LATER, run_name=name)
    for index in (1, 2):
        _delete_at_random(backend, started, index, draw)
    started.result()
    run = Run(Storage(store), name)
    _assert_same_bits(run, undisturbed)
    for index in (1, 2):
        assert [attempt.phase for attempt in started.of(f"train chunk {index}")] == ["Error", "Succeeded"]
    assert _chunks(run) == [(1, "done", 20), (2, "done", 40)]


def test_a_pod_deleted_and_the_run_submitted_again(
    backend: Backend, compiled: Callable[..., Path], store: str, undisturbed: Run
) -> None:
    """With `OnFailure`, Argo's own default, retries do not count for a pod that was deleted."""
    package = compiled(chunks__count=2)
    started = backend.start(package, run_name="again")
    _delete_at_random(backend, started, 2, random.Random(3))
    assert str(started.failure()) == "train chunk 2: pod deleted during operation"
    assert not started.of("evaluate")
    run = Run(Storage(store), "again")
    newest = next(CheckpointStore(run).committed()).step
    assert newest % 5 == 0, "nothing is saved on the signal: the container ends with its first process"
    resubmitted = backend.start(package, leave_out=LATER, run_name="again")
    resubmitted.result()
    _assert_same_bits(run, undisturbed)
    assert _chunks(run) == [(1, "done", 20), (1, "already_done", newest), (2, "done", 40)]


def _delete_at_random(backend: Backend, started: PipelineRun, index: int, draw: random.Random) -> None:
    """Deletes the pod of a chunk, while it starts or at one of its 20 steps."""
    step = draw.randrange(20)
    attempt = started.wait_for_pod(f"train chunk {index}", 20 * (index - 1) + step if step else 0)
    time.sleep(draw.uniform(0, 0.2 if step else 4))
    backend.delete(attempt)


def test_a_node_that_is_leaving_hands_on_to_the_spare_chunk(
    backend: Backend, compiled: Callable[..., Path], store: str, undisturbed: Run, core: Any
) -> None:
    notice = {"node_taints": [TAINT["key"]]}
    package = compiled(chunks__spare=1, chunks__preemption=notice, chunks__checkpoint_every=100)
    started = backend.start(package, leave_out=LATER, run_name="leaving")
    run = Run(Storage(store), "leaving")
    chunk = started.wait_for_pod("train chunk 1", 2)
    node = chunk.states[-1][1].spec.node_name
    with _leaving(core, node):
        started.wait_for_end(chunk)
        (saved,) = [step for index, outcome, step in _chunks(run) if (index, outcome) == (1, "partial")]
        assert 2 <= saved < 40
        time.sleep(3)  # the next chunk's pod is made meanwhile
        assert started.of("spare chunk 2")[0].states[-1][1].spec.node_name != node
    started.result()
    _assert_same_bits(run, undisturbed)
    assert _chunks(run) == [(1, "partial", saved), (2, "done", 40)]
    assert [attempt.phase for attempt in started.of("train chunk 1")] == ["Succeeded"]
    assert f"has taint baton/leaving: step {saved} of 40 is saved, the next chunk resumes from it" in chunk.log


def test_a_memory_limit_that_is_too_low_is_named_and_the_run_goes_on_with_a_higher_one(
    backend: Backend, compiled: Callable[..., Path], store: str, undisturbed: Run
) -> None:
    narrow = compiled(resources__memory="300Mi", resources__retries=1)
    started = backend.start(narrow, leave_out=LATER, run_name="narrow")
    # The kernel has killed the process that trains; the stage itself is left to say so, and what helps.
    assert str(started.failure()).startswith("train chunk 1: OOMKilled (exit code 1): ")
    assert "There was no memory left. Raise resources.memory" in started.of("train chunk 1")[0].log
    assert len(started.of("train chunk 1")) == 2
    wide = compiled(resources__memory="2Gi")
    backend.start(wide, leave_out=LATER, run_name="narrow").result()
    _assert_same_bits(Run(Storage(store), "narrow"), undisturbed)


def test_a_missing_secret_is_named_and_the_pod_starts_as_soon_as_it_is_there(
    backend: Backend, compiled: Callable[..., Path], store: str, undisturbed: Run, core: Any
) -> None:
    started = backend.start(compiled(resources__secret="later"), leave_out=LATER, run_name="secret")
    assert started.wait_for_reason("data split", "CreateContainerConfigError") == 'secret "later" not found'
    there = core.read_namespaced_secret("store", backend.namespace)
    core.create_namespaced_secret(backend.namespace, {"metadata": {"name": "later"}, "data": there.data})
    started.result()
    _assert_same_bits(Run(Storage(store), "secret"), undisturbed)


def test_a_missing_image_is_named_and_nothing_starts(backend: Backend, compiled: Callable[..., Path]) -> None:
    image = "registry.invalid/baton:absent"
    started = backend.start(compiled(resources__image=image), run_name="image")
    assert started.wait_for_reason("data split", "ImagePullBackOff") == f'Back-off pulling image "{image}"'
    backend.delete(started.of("data split")[0], grace=0)
    assert started.failure().task == "data split"


@contextlib.contextmanager
def _leaving(core: Any, node: str) -> Iterator[None]:
    """Cordons and taints a node, as a cluster does before it takes it away, and makes it as good as new."""
    before = core.read_node(node).spec.taints
    core.patch_node(node, {"spec": {"unschedulable": True, "taints": [TAINT]}})
    try:
        yield
    finally:
        core.patch_node(node, {"spec": {"unschedulable": None, "taints": before}})
