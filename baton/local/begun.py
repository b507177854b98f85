"""Runs begun from this machine, by name: address, command, process, log and Kubeflow endpoint.

A file a run in Baton's cache, by name and address. Commands find a run by its bare name there, whatever its store.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from baton import events, machine
from baton.kfp import processes
from baton.recipe.recipe import Recipe
from baton.runs.run import ORIGIN, Run
from baton.store.storage import Storage


@dataclass(frozen=True, kw_only=True)
class BegunRun:
    """A run that was begun from this machine."""

    name: str
    run_uri: str = ""
    phases: Sequence[str] = ()
    """Addresses of the runs of its phases, empty for a single training."""
    log_name: str = ""
    """Name of its log, where that is another: of the run that it is a phase of."""
    command: Sequence[str] = ()
    """Words that resume it, empty where there are none."""
    folder: str = ""
    """Working folder of `command`."""
    resumed: int = 0
    """Times that it was begun again before its end."""
    pid: int = 0
    """Process that runs it, 0 on Kubeflow."""
    pid_since: float = 0.0
    """Start of that process, as numbers of processes are used again."""
    endpoint: str = ""
    """Kubeflow Pipelines API that it was submitted to, empty for a run here."""
    namespace: str = ""
    run_id: str = ""

    @property
    def log(self) -> str:
        """Returns the path of the log that the local engine writes."""
        return os.path.join(machine.cache_dir(), "logs", f"{self.log_name or self.name}.log")

    @property
    def process(self) -> psutil.Process | None:
        """Returns the process that runs it, None once it has ended."""
        if not self.pid:
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.pid_since) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def note_here(
    name: str, run_uri: str, command: Sequence[str], *, resumes: bool = False, phases: Sequence[str] = ()
) -> None:
    """Notes that this process runs a run, and the runs of its phases.

    Args:
        name: Its name.
        run_uri: Its address.
        command: Words that resume it.
        resumes: Whether it had begun before, and not ended.
        phases: Addresses of its phases' runs.
    """
    process, before = psutil.Process(), find(name, run_uri)
    resumed = before.resumed if before else 0
    run = BegunRun(
        name=name,
        run_uri=run_uri,
        phases=list(phases),
        command=list(command),
        folder=os.getcwd(),
        resumed=resumed + resumes,
        pid=process.pid,
        pid_since=process.create_time(),
    )
    _write(run)
    for uri in phases:
        _write(replace(run, name=uri.rpartition("/")[2], run_uri=uri, phases=[], log_name=name))


def note_submitted(name: str, run_uri: str, endpoint: str, namespace: str | None, run_id: str) -> None:
    """Notes that a run was submitted to Kubeflow."""
    _write(BegunRun(name=name, run_uri=run_uri, endpoint=endpoint, namespace=namespace or "", run_id=run_id))


def forget(name: str, run_uri: str) -> None:
    """Removes the note of a run that is removed."""
    with contextlib.suppress(OSError):
        os.remove(_path(name, run_uri))


def find(name: str, run_uri: str | None = None) -> BegunRun | None:
    """Returns a run by its name, None for one that is not known here.

    Args:
        name: Its name. Several stores may have a run of one name: the newest begun counts.
        run_uri: Its address, for the run of this one store.
    """
    paths = [path for known, path in _files() if known == name] if run_uri is None else [_path(name, run_uri)]
    for path in sorted(paths, key=_begun_at, reverse=True):
        with contextlib.suppress(OSError, ValueError, TypeError):
            document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            return BegunRun(**{key: document[key] for key in BegunRun.__dataclass_fields__ if key in document})
    return None


def live_since(run: Run) -> float | None:
    """Returns when the process that runs a run began, in seconds since the epoch; None where none does."""
    known = find(run.name, run.uri)
    return known.pid_since if known and known.process else None


def names() -> list[str]:
    """Returns the names of all runs that are known here."""
    return sorted({name for name, _ in _files()})


def _files() -> list[tuple[str, str]]:
    """Returns name and path of each run's file."""
    with contextlib.suppress(OSError):
        files = [file for file in os.listdir(_folder()) if file.endswith(".json")]
        # Without an address: of an earlier version.
        return [(file.removesuffix(".json").partition("@")[0], os.path.join(_folder(), file)) for file in files]
    return []


def _begun_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _folder() -> str:
    return os.path.join(machine.cache_dir(), "runs")


def _path(name: str, run_uri: str) -> str:
    return os.path.join(_folder(), f"{name}@{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}.json")


def _write(run: BegunRun) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written to stops no run
        os.makedirs(_folder(), exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_folder(), encoding="utf-8", delete=False) as file:
            json.dump(asdict(run), file)
        os.replace(file.name, _path(run.name, run.run_uri))


def begin(
    recipe: Recipe,
    name: str,
    on_event: Callable[[events.Event], None],
    launch: processes.Launcher = processes.FreshProcess,
) -> Run:
    """Prepares a run that this process trains, and that ends with its last chunk."""
    note_here(name, Run(Storage(recipe.store.uri), name).uri, [])
    with processes.environment(**{ORIGIN["until"]: "train"}):
        return processes.prepare(recipe, name, on_event, launch)
