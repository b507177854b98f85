"""Tests in a fork of a process that has imported what they need, over a module that is not the one on disk.

Nothing is edited in place: a fork forgets the modules that stand on the mutated one, and imports them anew over it. So
a mutant that is killed, at any moment and by anyone, leaves the working tree as it is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import grimp
import psutil
import pytest

from tools.mutation.choosing import ROOT
from tools.mutation.operators import Mutant

WARM = (
    "baton.train.attempt",
    "baton.train.chunk",
    "baton.train.methods.sft",
    "baton.train.methods.dpo",
    "baton.data.tokenize",
    "baton.data.split",
    "baton.checkpoint.proof",
    "baton.evaluate.evaluate",
    "baton.local.results",
    "baton.__main__",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "hypothesis",
    "datasets",
    "s3fs",
    "obstore",
    "tools.mutation.ready",
)


def module_of(path: str) -> str:
    """Returns the name under which a file of ours is imported."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Overlay(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from another source than that on disk.

    Args:
        module: Its name.
        path: Its file.
        source: The source.
    """

    def __init__(self, module: str, path: str, source: bytes) -> None:
        super().__init__(module, path)
        self._source = source

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Finds that module alone."""
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_code(self, fullname: str) -> CodeType:
        """Returns its code, never from a cache."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


class Recorder:
    """A pytest plugin: runs some tests in a given order, and notes how each has ended.

    Args:
        order: The tests, all when None.
    """

    def __init__(self, order: Sequence[str] | None) -> None:
        self._order = order
        self.results: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves those tests, shortest first."""
        if self._order is not None:
            place = {test: number for number, test in enumerate(self._order)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the outcome and the time of a test."""
        result = self.results.setdefault(
            report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "setup": 0.0}
        )
        if report.outcome != "passed" and result["outcome"] != "failed":
            result["outcome"] = report.outcome
        result["setup" if report.when == "setup" else "seconds"] += report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a file of tests that cannot be imported."""
        if report.failed:
            self.results[report.nodeid] = {"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "setup": 0.0}


class Forks:
    """Forks of this process, which imports what they need."""

    def __init__(self) -> None:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch looks for GPUs without a CUDA context
        self._graph = grimp.build_graph("baton", cache_dir=None)
        _fork_in_place_of_a_server()
        for name in WARM:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()

    def begin(self, work: Callable[[Path], object], scratch: Path) -> int:
        """Forks, and returns the fork's number; what `work` returns it leaves in `scratch/result.json`."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            _set_apart(scratch)
            found = work(scratch)
        except BaseException:
            found = {"error": traceback.format_exc()}
        with contextlib.suppress(BaseException):
            (scratch / "result.json").write_text(json.dumps(found), encoding="utf-8")
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    def lay_over(self, mutant: Mutant, source: bytes) -> None:
        """Has this process, a fork, import a mutant in place of its module."""
        module = module_of(mutant.path)
        package, _, name = module.rpartition(".")
        stale = {module, *self._graph.find_downstream_modules(module)}
        for other in stale & sys.modules.keys():
            parent, _, attribute = other.rpartition(".")
            del sys.modules[other]
            # Else `from package import module` finds the old one.
            if parent in sys.modules and attribute in vars(sys.modules[parent]):
                delattr(sys.modules[parent], attribute)
        path = importlib.util.find_spec(package).submodule_search_locations[0]  # type: ignore[union-attr,index]
        sys.meta_path.insert(0, Overlay(module, f"{path}/{name}.py", mutant.apply(source)))


def run_tests(files: Sequence[str], order: Sequence[str] | None, scratch: Path, *options: str) -> Recorder:
    """Runs tests in this process, a fork.

    Args:
        files: Files of tests.
        order: The tests of them to run, all when None.
        scratch: Folder for what they write.
        options: Of pytest.
    """
    recorder = Recorder(order)
    fixed = ("-q", "-p", "no:cacheprovider", "--tb=line", f"--basetemp={scratch / 'pytest'}")
    pytest.main([*fixed, *options, *files], plugins=[recorder])
    return recorder


def end(pid: int) -> None:
    """Ends a fork and all that it has started: its session."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.pid == pid or os.getsid(process.pid) == pid:
                os.kill(process.pid, signal.SIGKILL)


def _fork_in_place_of_a_server() -> None:
    """Has what asks for a server to fork from fork this process: it has imported all, and knows the mutant."""
    from multiprocessing import forkserver

    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "forkserver" else method)  # type: ignore[assignment,misc]
    forkserver.ensure_running = lambda: None  # type: ignore[assignment]
    # pytest's handlers keep a fork from logging to the output that a test reads.
    os.register_at_fork(after_in_child=logging.getLogger().handlers.clear)


def _set_apart(scratch: Path) -> None:
    """Gives this process, a fork, its own session, output and temporary files, and keeps it from removing others'."""
    os.setsid()
    output = os.open(scratch / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    session, allowed = os.getsid(0), (f"{scratch}/", f"{ROOT}/build/")

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("shutil.rmtree", "os.remove", "os.rmdir", "os.rename", "os.truncate"):
            return
        path = arguments[0]
        if not isinstance(path, str | os.PathLike) or not os.path.isabs(path):
            return
        # Of a link it is the link that goes.
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if path.startswith(allowed) or "__pycache__" in path:
            return
        if path.startswith("/dev/shm/"):
            of = Path(path).parts[3].split("-")  # baton-<host>-<process>-<random>, where it is staging's
            if of[0] != "baton" or not (of[-2].isdigit() and _is_of_another(int(of[-2]), session)):
                return
        raise PermissionError(f"a mutant would {event} {path}")

    sys.addaudithook(guard)


def _is_of_another(pid: int, session: int) -> bool:
    """Tells whether a process lives and is none of ours."""
    try:
        return pid != 0 and os.getsid(pid) != session
    except ProcessLookupError:
        return False


def wait_for(running: dict[int, float]) -> tuple[int, bool]:
    """Returns the next fork that ends, and whether its time was up.

    Args:
        running: Fork → when it must have ended.
    """
    while True:
        for pid, until in running.items():
            if os.waitpid(pid, os.WNOHANG)[0]:
                end(pid)
                return pid, False
            if time.monotonic() > until:
                end(pid)
                os.waitpid(pid, 0)
                return pid, True
        time.sleep(0.05)


def scratch_folder() -> Path:
    """Makes a folder for a fork."""
    return Path(os.path.realpath(tempfile.mkdtemp(prefix="baton-mutant-")))


def clear(scratch: Path) -> None:
    """Removes it, with what a test that was ended has mounted there."""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        if line.split()[1].startswith(f"{scratch}/"):
            subprocess.run(["umount", line.split()[1]], check=False)
    shutil.rmtree(scratch, ignore_errors=True)
