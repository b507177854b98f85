"""Stages forked from a server that has imported what they import: a process each, and not eight seconds of imports.

The server (`multiprocessing`'s) imports, fills a table of Transformers, and does nothing else, so that a stage finds
what a fresh interpreter would have: its own memory, no CUDA context, no threads that a fork would lose, its own random
state. If variables that libraries read at import have changed since, the stage begins as a
fresh interpreter.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import random
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

import psutil

from baton import events, machine
from baton.kfp import processes
from baton.kfp.component import EXECUTOR, RUNTIME
from baton.store.clouds import ENVIRONMENT

_READ_LATE = (  # beginnings of variables that are read when needed, not when libraries load
    *ENVIRONMENT,
    *("BATON_", "MLFLOW_", "_MLFLOW_", "PYTEST_", "TORCHINDUCTOR_CACHE_DIR", "CUBLAS_WORKSPACE_CONFIG"),
    *("COLUMNS", "LINES", "PWD", "OLDPWD", "SHLVL", "PYTHONUNBUFFERED"),
)
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_context = multiprocessing.get_context("forkserver")
_children = threading.RLock()
"""Held while exit codes are read: each can be read once, and whoever starts a process reads those of all that ended."""


def start() -> None:
    """Starts the server, unless it runs or `BATON_FORKSERVER` is 0; it imports in the background."""
    machine.settle_home()
    if _is_on():
        _require_server()


def launcher() -> processes.Launcher:
    """Returns the kind of process that stages of this machine are."""
    return ForkedProcess if _is_on() else processes.FreshProcess


def _is_on() -> bool:
    # Elsewhere than on Linux what torch loads does not outlive a fork. A daemonic process may have no children.
    is_daemonic = multiprocessing.current_process().daemon
    return sys.platform == "linux" and machine.forks_stages() and not is_daemonic


def _require_server() -> None:
    from multiprocessing import forkserver

    _context.set_forkserver_preload(["__main__", "baton.local.preloaded"])
    forkserver.ensure_running()


class _Pipe:
    """A pipe's end, sent with the request to fork: none stays open when a process is killed before it fetches it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        # Sent with a process that is being started; at any other time a thread would wait for the receiver.
        return _received, (DupFd(self._descriptor),)


def _received(descriptor: Any) -> Any:
    return descriptor


class ForkedProcess:
    """A program as `python -m` runs it, in a forked process; see `processes.Process`."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        own_group: bool = True,  # `kill` ends its children too, and Ctrl-C does not reach it
    ) -> None:
        _require_server()
        self._own_group, self._printed = own_group, list[str]()
        self._reader, writer = os.pipe()
        variables = {**os.environ, "BATON_EVENTS": "stdout"} if environment is None else dict(environment)
        module, *stage = program.split()
        try:
            self._process = _context.Process(
                target=_serve, args=(_Pipe(writer), module, (*stage, *arguments), variables, own_group)
            )
            with _children:
                self._process.start()
        finally:
            # The child's copy alone counts: with one here, reading would not end with it.
            os.close(writer)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def lines(self) -> Iterator[str]:
        rest = b""
        try:
            # Its own end counts and not the pipe's: a remaining child may hold that open.
            while self._reader in wait([self._reader, self._process.sentinel]):
                if not (data := os.read(self._reader, 65536)):
                    break
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") + "\n" for line in lines)
        finally:
            os.close(self._reader)
        if rest:
            yield rest.decode(errors="replace")

    def events(self) -> Iterator[events.Event]:
        for line in self.lines():
            if event := events.parse(line):
                yield event
            else:
                self._printed.append(line)

    def output(self) -> str:
        return "".join(self._printed)[-2000:]

    def kill(self) -> None:
        with _children:
            if self._process.exitcode is not None:
                return
        with contextlib.suppress(ProcessLookupError):
            # Itself first: it makes its group after it has begun, and may not have come so far.
            os.kill(self.pid, signal.SIGKILL)
        if self._own_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        wait([self._process.sentinel])
        with _children:
            self._process.join()
        return self._process.exitcode or 0


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Puts forked stages where kfp's runner of processes starts an interpreter, unless `BATON_FORKSERVER` is 0."""
    from kfp.local import subprocess_task_handler as handler

    if not _is_on():
        yield
        return
    before = handler.run_local_subprocess

    def run(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
        _, option, module, *arguments = full_command
        if (option, module) != ("-m", EXECUTOR):
            return int(before(full_command, env_vars))  # a component that is not ours
        process = ForkedProcess(module, arguments, {**os.environ, **(env_vars or {})}, own_group=False)
        try:
            for line in process.lines():
                print(line, end="")
        except BaseException:  # with this process alone ended, the stage would fail at its closed output
            process.kill()
            process.wait()
            raise
        return process.wait()

    # kfp has no hook for this. Without it each stage starts an interpreter and imports torch and TRL.
    handler.run_local_subprocess = run
    try:
        yield
    finally:
        handler.run_local_subprocess = before


def _end_with_launcher(sentinel: int) -> None:
    """Ends this stage and its children once the process that began it is gone, as after `kill -9`.

    Else it would train on next to the run that resumes, and publish its broken pipe as the run's failure.
    """
    wait([sentinel])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(output: Any, module: str, arguments: tuple[str, ...], environment: dict[str, str], own_group: bool) -> None:
    if own_group:
        os.setpgid(0, 0)
    descriptor = output.detach()
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    if reason := _unlike_fresh(environment):
        print(f"a fresh interpreter for {module}: {reason}", flush=True)
        # The server lives on while one of its pipes is open. It ends with the launcher, and Linux kills its child then.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Process number and pipe stay as they are: who started it sees no difference.
        os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    threading.Thread(target=_end_with_launcher, args=(launcher.sentinel,), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    # Processes of its own begin as those of a fresh interpreter: else each worker of a data loader would import again.
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [module, *arguments]
    sys.path.insert(0, os.getcwd())
    # Every fork begins with the server's state: all stages would draw the same.
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing omits them
        sys.stdout.flush()
        sys.stderr.flush()


def _unlike_fresh(environment: Mapping[str, str]) -> str | None:
    """Returns why a fresh interpreter would import something else than the server has, None where it would not."""
    from baton.local import preloaded

    wanted, imported = _read_early(environment), _read_early(preloaded.ENVIRONMENT)
    if changed := sorted(name for name in wanted.keys() | imported.keys() if wanted.get(name) != imported.get(name)):
        return f"{', '.join(changed)} changed since libraries were imported"
    torch = sys.modules.get("torch")
    return "CUDA is in use" if torch is not None and torch.cuda._is_in_bad_fork() else None


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_READ_LATE) and name not in ("_", RUNTIME)
    }
