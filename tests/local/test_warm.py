"""Stages forked from a warm server: processes as good as fresh interpreters, and fresh ones where they are not."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton import machine
from baton.local import forkserver
from baton.runs.outcomes import EvaluationResult, GateVerdict
from baton.runs.run import Run
from baton.store.storage import Storage

PROBE = """
import atexit, json, multiprocessing, os, random, sys
if __name__ == "__main__":
    loaded = "torch" in sys.modules
    atexit.register(lambda: print("said at the end", flush=True))
    print(json.dumps({"warm": loaded, "argv": sys.argv[1:], "pid": os.getpid(), "random": random.random(),
                      "name": __name__, "value": os.environ.get("BATON_PROBE"), "group": os.getpgid(0),
                      "starts": multiprocessing.get_start_method()}), flush=True)
    if sys.argv[1:] == ["wait"]:
        os.system("sleep 60")
    sys.exit(int(os.environ.get("BATON_CODE", "0")))
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any], list[str]]]:
    """Runs a module that tells what it finds: exit code, what it told, and the lines after that."""
    (tmp_path / "probe_of_warm.py").write_text(PROBE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **environment: str) -> tuple[int, dict[str, Any], list[str]]:
        process = forkserver.ForkedProcess("probe_of_warm", arguments, {**os.environ, **environment})
        first, *rest = process.lines()
        return process.wait(), json.loads(first), rest

    return run


def test_a_stage_has_its_imports_and_nothing_of_another(probe: Callable[..., Any]) -> None:
    (code, one, rest), (_, other, _) = probe("a", "b", BATON_PROBE="x"), probe(BATON_CODE="3")
    assert code == 0
    assert one["warm"]
    assert one["name"] == "__main__"
    assert (one["argv"], one["value"]) == (["a", "b"], "x")
    assert (other["argv"], other["value"]) == ([], None)
    assert len({one["pid"], other["pid"], os.getpid()}) == 3
    assert one["random"] != other["random"]
    assert one["starts"] == multiprocessing.get_start_method()
    assert rest == ["said at the end\n"]


def test_a_stage_does_not_import_the_command_line() -> None:
    script = str(Path(sys.executable).with_name("baton"))
    code = f"import runpy, sys; runpy.run_path({script!r}, run_name='__mp_main__'); sys.exit('kfp' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "_KFP_RUNTIME": "true"}, check=True)


def test_its_exit_code_is_told(probe: Callable[..., Any]) -> None:
    assert probe(BATON_CODE="3")[0] == 3


def test_what_libraries_read_at_import_gives_it_a_fresh_interpreter(probe: Callable[..., Any]) -> None:
    process = forkserver.ForkedProcess(
        "probe_of_warm", ["a"], {**os.environ, "OMP_NUM_THREADS": "7", "BATON_CODE": "4"}
    )
    said, first, *rest = process.lines()
    found = json.loads(first)
    assert not found["warm"]
    assert (process.wait(), found["argv"], rest) == (4, ["a"], ["said at the end\n"])
    assert said == "a fresh interpreter for probe_of_warm: OMP_NUM_THREADS changed since libraries were imported\n"


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_kill_ends_its_children_too(probe: Callable[..., Any], tmp_path: Path) -> None:
    process = forkserver.ForkedProcess("probe_of_warm", ["wait"])
    lines = process.lines()
    found = json.loads(next(lines))
    assert found["pid"] == found["group"] == process.pid
    started = time.monotonic()
    process.kill()
    assert list(lines) == []
    assert process.wait() == -signal.SIGKILL
    assert time.monotonic() - started < 30
    while _is_there(found["group"]):  # until the machine has taken note of the child's end
        assert time.monotonic() - started < 30
        time.sleep(0.05)


LAUNCHER = """
import os, sys
from baton.local.forkserver import ForkedProcess
if __name__ == "__main__":
    changed = {"OMP_NUM_THREADS": "7"} if sys.argv[1] == "fresh" else {}
    process = ForkedProcess("probe_of_warm", ["wait"], {**os.environ, **changed}, own_group=False)
    lines = process.lines()
    print(*[next(lines) for _ in range(1 + len(changed))][-1:], end="", flush=True)
    process.wait()
"""


@pytest.mark.parametrize("start", ["forked", pytest.param("fresh", marks=pytest.mark.slow)])
def test_a_launchers_kill_ends_its_stages(start: str, probe: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    with subprocess.Popen([sys.executable, "launcher.py", start], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        found = json.loads(launcher.stdout.readline())
        assert found["warm"] == (start == "forked")
        stage = psutil.Process(found["pid"])
        assert stage in psutil.Process(launcher.pid).children(recursive=True)
        ended = [stage, *(stage.children(recursive=True) if start == "forked" else [])]
        launcher.kill()
        assert not psutil.wait_procs(ended, timeout=30)[1]


@pytest.mark.slow
def test_the_engine_runs_its_stages_forked_unless_told_not_to(two_step_package: Path, tmp_path: Path) -> None:
    run = Run(Storage(str(tmp_path)), "r")
    run.write(EvaluationResult(gate=GateVerdict(passed=True)))
    code = f"""
from kfp import components, dsl, local
from baton.components.gate.component import reject
from baton.local import forkserver as warm

@dsl.pipeline
def twice():
    reject(baton=reject(baton={run.uri!r}).outputs["Output"])

if __name__ == "__main__":
    told = []
    forked = warm.ForkedProcess.__init__
    warm.ForkedProcess.__init__ = lambda self, *args, **more: (told.append(args[1]), forked(self, *args, **more))[1]
    with warm.installed():
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root={str(tmp_path)!r}, raise_on_error=True)
        components.load_component_from_file({str(two_step_package)!r})(num_rows=3)  # not ours: as kfp runs it
        twice()
    print("forked", len(told))
"""
    counts = {}
    for value in ("1", "0"):
        given = {**os.environ, machine.FORKSERVER: value, "BATON_EVENTS": "stdout"}
        done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "plain {'rows': 3.0} True" in done.stdout  # the second stage got what the first one left
        assert done.stdout.count('"stage": "rejected", "state": "done"') == 2
        counts[value] = done.stdout.splitlines()[-1]
    assert counts == {"1": "forked 2", "0": "forked 0"}


def test_stages_that_begin_and_end_at_once_have_their_own_exit_codes(probe: Callable[..., Any]) -> None:
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda number: probe(BATON_CODE=str(number % 3))[0], range(60)))
    assert codes == [number % 3 for number in range(60)]


def test_stages_that_are_killed_before_they_begin_leave_nothing_open_here(
    probe: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    probe()  # what the first one opens stays
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        process = forkserver.ForkedProcess("probe_of_warm", ["wait"])
        process.kill()
        assert list(process.lines()) == []
        assert process.wait() == -signal.SIGKILL
        del process
    assert len(os.listdir("/proc/self/fd")) <= before
    assert "Traceback" not in capfd.readouterr().err
