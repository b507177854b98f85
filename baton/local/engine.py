"""The local engine: runs the very compiled file through `kfp.local`, each stage its own process or container.

kfp's runner, standard output, the log's handlers and the environment are the whole process's. So one run at a time has
them: another that begins meanwhile has an engine in a process of its own.
"""

import builtins
import collections
import contextlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from baton import events, machine
from baton.checkpoint import zero_format
from baton.compiler.pipeline_file import Pipeline, packaged
from baton.errors import BatonError, UserError
from baton.kfp import processes
from baton.local import docker, forkserver
from baton.recipe import extras, load
from baton.recipe.recipe import Recipe
from baton.source import credentials, prepare

_taken = threading.Lock()  # held by the run that has this process's engine
_before: dict[str, str | None] = {}  # variables that the engine has set → values before


def require_one_machine(recipe: Recipe) -> None:
    """Refuses a recipe whose chunks take several machines."""
    if recipe.max_nodes > 1:
        raise UserError(
            f"resources.nodes is {recipe.max_nodes}, and this is one machine.",
            remedy="Submit the run to a cluster, or set resources.nodes to 1: resources.gpus, or "
            "training.parallel.processes on the CPU, can give as many processes here.",
        )


def run_recipe(
    recipe: Recipe,
    name: str,
    *,
    pipeline: Pipeline = Pipeline.finetune,
    arguments: Mapping[str, object],
    on_event: Callable[[events.Event], None],
    containers: bool,
) -> None:
    """Compiles a recipe, its paths absolute, and runs it here, unless this machine lacks something that it needs."""
    require_one_machine(recipe)
    if not _taken.acquire(blocking=False):
        request = {
            "recipe": load.dumps(recipe),
            "name": name,
            "pipeline": pipeline,
            "arguments": dict(arguments),
            "containers": containers,
            "environment": dict(_before),
        }
        _run_apart(request, on_event)
        return
    try:
        recipe = credentials.require_signing_key(recipe)
        if not containers:
            for part in recipe.phase_recipes() or [recipe]:
                zero_format.require_package(part)
                extras.require_all_packages(part)
            forkserver.start()  # imports in parallel
        prepare.check_model(recipe)
        with (
            packaged(at_once(recipe), "pipeline", pipeline) as package,
            _environment(**credentials.signing_environment(recipe)),
        ):
            run(package, name, arguments, on_event=on_event, in_containers=recipe if containers else None)
    finally:
        _taken.release()


def at_once(recipe: Recipe) -> Recipe:
    """Returns a recipe whose stages are tried once.

    kfp's engine would start whatever fails again, mistakes too, after a pause; who sits here can do so himself.
    """
    return recipe.model_copy(update={"resources": recipe.resources.model_copy(update={"retries": 0})})


def _run_apart(request: Mapping[str, object], on_event: Callable[[events.Event], None]) -> None:
    """Runs a recipe by `main` in a fresh interpreter, and raises its error."""
    ends: list[events.Error] = []

    def heard(event: events.Event) -> None:
        if isinstance(event, events.Error) and not event.stage:
            ends.append(event)
        else:
            on_event(event)

    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(request, file)
        file.flush()
        process = processes.FreshProcess("baton.local.engine", [file.name])
        processes.follow(process, heard)
        code, printed = process.wait(), process.output()
    if ends:
        raise (UserError if ends[0].exit_code == UserError.exit_code else BatonError)(ends[0].message)
    if code:
        raise BatonError(f"the engine of run {request['name']!r} ended with code {code}: {printed}")


def main(path: str) -> int:
    """Runs the request of `_run_apart` and tells its events; an error without a stage is the run's own end."""
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    output = sys.stdout

    def tell(event: events.Event) -> None:
        with contextlib.redirect_stdout(output), _environment(BATON_EVENTS="stdout"):
            events.emit(event)

    try:
        # A server of forks would hold the output open that somebody reads to its end.
        with processes.environment(**{**request["environment"], machine.FORKSERVER: "0"}):
            run_recipe(
                load.loads(request["recipe"]),
                request["name"],
                pipeline=Pipeline(request["pipeline"]),
                arguments=request["arguments"],
                on_event=tell,
                containers=request["containers"],
            )
    except BatonError as error:
        tell(events.Error("", str(error), error.exit_code))
        return error.exit_code
    return 0


def run(
    package_path: str,
    name: str,
    arguments: Mapping[str, object],
    *,
    on_event: Callable[[events.Event], None],
    in_containers: Recipe | None = None,  # its paths absolute; stages are then containers of its image
    repair: Callable[[], object] = lambda: None,
) -> None:
    """Runs a compiled pipeline to its end; output other than events goes to the log called `name`.

    It goes back once where a stage has marked damage, after `repair`, for stages that the pipeline lacks.
    Of stages that run at once, one at a time has `on_event`.
    """
    for may_repair in (True, False):
        failure = _once(package_path, name, arguments, on_event, in_containers)
        if failure is None:
            return
        if not (may_repair and failure.marked):
            raise processes.error_of(failure)
        # Once more: whole results are found done, marked ones are made again.
        on_event(processes.StageRepaired(failure.stage, failure.message))
        repair()


def _once(
    package_path: str,
    name: str,
    arguments: Mapping[str, object],
    on_event: Callable[[events.Event], None],
    in_containers: Recipe | None,
) -> events.Error | None:
    """Runs a compiled pipeline, and returns the failure of a stage."""
    from kfp import components, local

    log_path = os.path.join(machine.cache_dir(), "logs", f"{name}.log")
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    with (
        open(log_path, "a", encoding="utf-8") as log,
        tempfile.TemporaryDirectory(prefix="baton-kfp-") as root,
        docker.runner(in_containers, package_path, root) if in_containers else forkserver.installed() as containers,
    ):
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} run {name}\n")
        local.init(containers or local.SubprocessRunner(use_venv=False), pipeline_root=root, raise_on_error=True)
        pipeline = components.load_component_from_file(package_path)
        lines = _Lines(on_event, log)
        with _captured(lines), _environment(BATON_EVENTS="stdout", PYTHONUNBUFFERED="1"):
            try:
                pipeline(**arguments)
            except RuntimeError as error:
                if not lines.failures:
                    remedy = f"Its output is in {log_path}."
                    raise BatonError(f"{error} The stage ended without a message.", remedy=remedy) from None
                return lines.failures[-1]
    return None


# Lines of kfp's engine about tasks, whose events tell more. Outputs have a block, which ends with a rule.
_OF_KFP = re.compile(
    r"[\d:.]+ - INFO - (?:(Task \S+ outputs:)|Task \S+ (?:finished|has)|Executing task|Streamed logs:"
    r"|Running pipeline|Pipeline \S+ finished|Cleaned up)"
)
_RULE = re.compile(r"-{20,}$")


class _Lines(io.TextIOBase):
    """A text stream that tells events from ordinary output; the log has both, without kfp's own lines.

    One event at a time is heard. No writer waits for another: it may be a thread that who hears an event waits for.
    """

    def __init__(self, on_event: Callable[[events.Event], None], log: TextIO) -> None:
        self.failures: list[events.Error] = []
        self._on_event, self._log = on_event, log
        self._of_task = _OfTask()
        self._unheard: collections.deque[events.Event] = collections.deque()
        self._hearing = threading.Lock()

    def write(self, text: str) -> int:
        of_task = self._of_task
        *lines, of_task.rest = (of_task.rest + text).split("\n")
        for line in lines:
            if event := events.parse(line):
                if isinstance(event, events.Error):
                    self.failures.append(event)
                self._unheard.append(event)
                self._log.write(f"{time.strftime('%H:%M:%S')} {event}\n")
            elif _RULE.match(line):
                of_task.skips = False
            elif engine := _OF_KFP.match(line):
                of_task.skips = bool(engine[1])
            elif line and not of_task.skips:
                self._log.write(line + "\n")
        self._log.flush()
        while self._unheard and self._hearing.acquire(blocking=False):
            try:
                while self._unheard:
                    self._on_event(self._unheard.popleft())
            finally:
                self._hearing.release()
        return len(text)


class _OfTask(threading.local):
    """State of a task's output; kfp gives each of several tasks at once a thread."""

    rest = ""  # begun line
    skips = False  # within a block of outputs


@contextlib.contextmanager
def _captured(stream: _Lines) -> Iterator[None]:
    """Sends all output of engine and stages, and the engine's log, to one stream."""
    printing = builtins.print  # kfp indents it, and after parallel tasks it stays indented
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    try:
        with (
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
            warnings.catch_warnings(),
        ):
            # Names of tasks, resources and the like are for Kubeflow.
            warnings.filterwarnings("ignore", message=".*no effect in the current local runner")
            yield
    finally:
        builtins.print = printing
        root.handlers[:] = before
        root.setLevel(level)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    for name in values:
        _before.setdefault(name, os.environ.get(name))
    with processes.environment(**values):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
