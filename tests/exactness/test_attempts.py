"""A chunk's process is lost, and its pod starts another one, which ends on the same bits; or none may mend it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError
from baton.pages import run_page as report_page
from baton.pages.collect import collect
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.train import supervisor


def _halfway(name: str, recipes: dict[str, Recipe], legs: Any) -> Run:
    run: Run = legs.prepare(legs.changed(recipes["lora"], chunks__count=3), name)
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    return run


@pytest.mark.parametrize(
    ("ends", "times", "said"),
    [
        ("killed", 1, "the process of chunk 2 was ended by SIGKILL."),
        pytest.param("killed", 2, "the process of chunk 2 was ended by SIGKILL.", marks=pytest.mark.slow),
        pytest.param("segfault", 1, "the process of chunk 2 was ended by SIGSEGV.", marks=pytest.mark.slow),
        ("device", 1, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        pytest.param("store", 1, "store 's3://baton' does not answer.", marks=pytest.mark.slow),
    ],
)
def test_a_lost_process_is_followed_by_a_fresh_one(
    ends: str, times: int, said: str, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, tmp_path: Path
) -> None:
    run = _halfway(f"lost-{ends}-{times}", recipes, legs)
    code, printed = legs.leg(legs.chunk_in_a_pod, run.uri, 2, 10, ends, times, str(tmp_path))
    assert code == 0, printed
    assert printed.count("restarted chunk=2") == times
    assert said in printed
    assert printed.count("restored step=8") == times, "each resumes from the newest checkpoint"
    legs.train(run)
    noted = run.restarts()
    assert [restart.chunk for restart in noted] == [2] * times
    assert all(restart.reason.startswith(said.rstrip(".")) and restart.seconds > 0 for restart in noted)
    assert legs.final(run).meta.work.restarts == times
    assert legs.final(undisturbed["lora"]).meta.work.restarts == 0
    assert f"{times} process{'es' * (times > 1)} lost and started again" in report_page.render(collect(run))
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("user", 2, "hooks.loss returns text; expected a tensor."),
        ("fault", 1, "KeyError: 'labels'"),
        pytest.param("memory", 1, "CUDA error: out of memory", marks=pytest.mark.slow),
    ],
)
def test_what_a_fresh_process_cannot_mend_does_not_start_twice(
    ends: str, code: int, said: str, recipes: dict[str, Recipe], legs: Any, tmp_path: Path
) -> None:
    run = _halfway(f"ends-{ends}", recipes, legs)
    ended, printed = legs.leg(legs.chunk_in_a_pod, run.uri, 2, 10, ends, 9, str(tmp_path))
    assert ended == code, printed
    assert said in printed
    assert "restarted" not in printed
    assert len(list(tmp_path.iterdir())) == 1


def test_a_divergence_that_repeats_is_not_started_again(recipes: dict[str, Recipe], legs: Any, tmp_path: Path) -> None:
    """A state that has diverged breaks the device at the same step each time; a device that is broken at any."""
    run = _halfway("diverged", recipes, legs)
    code, printed = legs.leg(legs.chunk_in_a_pod, run.uri, 2, 10, "device", 9, str(tmp_path))
    assert code == 1, printed
    assert "was encountered It came after step 10. So did the process before. See whether training has" in printed
    assert printed.count("restarted chunk=2") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_device_that_breaks_at_another_step_is_started_again(
    recipes: dict[str, Recipe], legs: Any, tmp_path: Path
) -> None:
    run = _halfway("flaky", recipes, legs)
    code, printed = legs.leg(legs.chunk_in_a_pod, run.uri, 2, 6, "device, then later", 2, str(tmp_path))
    assert code == 0, printed
    assert "It came after step 6." in printed
    assert "It came after step 8." in printed
    assert printed.count("restarted chunk=2") == 2


def test_a_notice_to_the_stage_reaches_the_process_that_trains(
    recipes: dict[str, Recipe], legs: Any, tmp_path: Path
) -> None:
    run = _halfway("notice", recipes, legs)
    code, printed = legs.leg(legs.chunk_in_a_pod, run.uri, 2, 6, "preempted", 1, str(tmp_path))
    assert code == 0, printed
    assert "partial chunk=2" in printed
    assert "notice=SIGTERM" in printed
    assert "restarted" not in printed
    assert 6 <= CheckpointStore(run).steps()[-1] < 10


def test_the_process_that_trains_ends_with_its_stage(recipes: dict[str, Recipe], legs: Any, tmp_path: Path) -> None:
    """It would train on beside the one that takes its place."""
    run = _halfway("orphaned", recipes, legs)
    code, printed = legs.leg(legs.chunk_in_a_pod, run.uri, 2, 6, "orphaned", 1, str(tmp_path))
    assert code == -signal.SIGKILL, printed
    assert "step step=6 " in printed
    assert "step step=10 " not in printed, "what it printed has ended with it"
    assert CheckpointStore(run).steps()[-1] < 10


def _in_a_fresh_interpreter(
    run: Run, step: int, ends: str, folder: Path, *, index: int = 2, times: int = 1, **environment: str
) -> tuple[int, str]:
    """Runs a chunk as a pod does, which has imported nothing."""
    code = f"""
from baton import events
from tests.exactness import legs
with events.stage("train chunk {index}"):
    legs.chunk_in_a_pod({run.uri!r}, {index}, {step}, {ends!r}, {times}, {str(folder)!r})
"""
    command, given = [sys.executable, "-c", code], {**os.environ, **environment}
    done = subprocess.run(
        command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=200
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("warm", "ends", "taken"),
    [("1", "killed, with a spare", 1), pytest.param("0", "killed", 0, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_process_that_has_imported_takes_the_place_of_one_that_is_lost(
    warm: str, ends: str, taken: int, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, tmp_path: Path
) -> None:
    run = _halfway(f"spare-{warm}", recipes, legs)
    code, printed = _in_a_fresh_interpreter(run, 10, ends, tmp_path, BATON_FORKSERVER=warm)
    assert code == 0, printed
    assert printed.count("restarted chunk=2") == 1
    assert printed.count("a process that has imported already takes its place") == taken
    legs.train(run)
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state


@pytest.mark.parametrize(
    ("warm", "ends"), [("0", "killed"), pytest.param("1", "killed, with a spare", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_on_s3_a_lost_process_is_followed_by_others(
    warm: str, ends: str, s3_store: str, recipes: dict[str, Recipe], legs: Any, tmp_path: Path
) -> None:
    """The store's client has threads, which a fork does not have: a process that lacks them would wait for ever."""
    run: Run = legs.prepare(legs.changed(recipes["lora"], store=s3_store, chunks__count=3), f"lost-s3-{warm}")
    code, printed = _in_a_fresh_interpreter(run, 4, ends, tmp_path, index=1, times=2, BATON_FORKSERVER=warm)
    assert code == 0, printed
    assert printed.count("restarted chunk=1") == 2
    assert len(run.restarts()) == 2
    assert CheckpointStore(run).steps()[-1] == run.plan().targets[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no spare process where none is forked")
def test_the_process_that_waits_ends_with_its_stage(recipes: dict[str, Recipe], legs: Any, tmp_path: Path) -> None:
    run = _halfway("orphaned-spare", recipes, legs)
    code, printed = _in_a_fresh_interpreter(run, 10, "orphaned, with a spare", tmp_path)
    assert code == -signal.SIGKILL, printed
    spare = int(printed.rpartition("spare ")[2].split()[0])
    deadline = time.monotonic() + 30
    while psutil.pid_exists(spare) and psutil.Process(spare).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it waits for a stage that is gone"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_processes_of_a_pod_are_counted(recipes: dict[str, Recipe], legs: Any, tmp_path: Path) -> None:
    run = _halfway("lost-for-good", recipes, legs)
    code, printed = legs.leg(legs.chunk_in_a_pod, run.uri, 2, 10, "killed", 9, str(tmp_path))
    assert code == 1, printed
    assert len(list(tmp_path.iterdir())) == 3, "chunks.retries is 2"
    assert "the process of chunk 2 was ended by SIGKILL. Run again" in printed
    assert CheckpointStore(run).steps()[-1] == 8


def test_memory_that_ran_out_is_told_from_a_kill(
    recipes: dict[str, Recipe], legs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts in the container's cgroup whom it has killed; here a file stands for its."""
    run = _halfway("out-of-memory", recipes, legs)
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "ends").mkdir()
    counts = tmp_path / "cgroup" / "memory.events"
    counts.write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 0\n")
    code, printed = legs.leg(legs.out_of_memory, run.uri, 2, 10, str(counts), str(tmp_path / "ends"))
    assert code == 1, printed
    assert "was ended by SIGKILL. There was no memory left. Raise resources.memory" in printed
    assert "restarted" not in printed
    assert len(list((tmp_path / "ends").iterdir())) == 1


def test_an_error_crosses_to_the_stage_as_it_was() -> None:
    class OwnError(DamagedError):
        """One that a room keeps for itself."""

    for kind in (DamagedError, OwnError):
        error = supervisor.as_shared(kind("a file is short.", remedy="Run again."))
        assert type(error) is DamagedError
        assert (error.message, error.remedy) == ("a file is short.", "Run again.")


def test_a_pod_without_its_gpu_ends_before_it_fetches_anything(recipes: dict[str, Recipe], legs: Any) -> None:
    """The scheduler gave it one, and torch sees none: an image with a CPU build, or a broken driver."""
    run: Run = legs.prepare(legs.changed(recipes["lora"], chunks__count=2, resources__gpus=1), "promised")
    code, printed = legs.leg(legs.promised_a_gpu, legs.chunk, run.uri, 1)
    assert code == 1, printed
    assert "this pod was promised 1 GPU and sees 0: driver" in printed
    assert f"image {run.recipe().resources.image}." in printed
    assert "slice" not in printed
    assert "phase=import" not in printed
    assert "restarted" not in printed
    code, printed = legs.leg(legs.promised_a_gpu, legs.evaluate, run.uri)
    assert (code, "this pod was promised 1 GPU" in printed) == (1, True)
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0, "resources are the cluster's alone"
