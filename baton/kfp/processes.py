"""Stages as separate processes, followed by the events that they print."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Protocol

from baton import events, machine, scratch
from baton.errors import BatonError, SkipError, UserError
from baton.events import Error, Event
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.runtime import through_skips
from baton.store.storage import Storage

DATA_SPLIT = "baton.kfp.process data_split"
TOKENIZE = "baton.kfp.process tokenize"
TRAIN_CHUNK = "baton.kfp.process train_chunk"
TAKE_TURNS = "baton.kfp.process take_turns"
CHECKPOINT = "baton.kfp.process checkpoint"
CHECK_TURNS = "baton.kfp.process check_turns"
PAGES = "baton.kfp.process pages"


class StageRepaired(Event):
    """A stage of this machine's found damage, and the run goes back once to make it again."""

    stage: str
    message: str


class TrialFailed(Event):
    """A chunk of a trial on this machine failed for good."""

    trial: str
    chunk: int
    message: str


class Process(Protocol):
    @property
    def pid(self) -> int:
        """Its process number."""

    def events(self) -> Iterator[Event]:
        """Yields its events until it ends."""

    def kill(self) -> None:
        """Ends it and its children as a node's end would: `kill -9`."""

    def wait(self) -> int:
        """Waits for its end and returns its exit code, below 0 for a signal."""

    def output(self) -> str:
        """Returns the end of its output for people, once it has ended."""


Launcher = Callable[[str, Sequence[str]], Process]
"""Starts a program, given as `python -m` takes it: a module and perhaps the name of a stage, with its arguments."""


class FreshProcess:
    """A stage in a fresh interpreter, in its own process group; see `Process`.

    With `ends_with_this` its log is this process's, and the kernel kills it with the thread that has started it.
    """

    def __init__(self, program: str, arguments: Sequence[str], *, ends_with_this: bool = False) -> None:
        # A file, and not a second pipe: it is not read while events are, and a full one would stop the stage.
        self._errors: IO[str] | None = None
        if not ends_with_this:
            self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        environment = {**os.environ, "BATON_EVENTS": "stdout", "PYTHONUNBUFFERED": "1"}
        if ends_with_this:
            environment[machine.ENDS_WITH] = str(os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-m", *program.split(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[Event]:
        assert self._process.stdout
        with self._process.stdout:
            for line in self._process.stdout:
                if event := events.parse(line):
                    yield event
                elif self._errors is None:
                    print(line, end="", flush=True)

    def kill(self) -> None:
        if self._process.returncode is None:  # not yet waited for: the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> int:
        return self._process.wait()

    def output(self) -> str:
        if self._errors is None:
            return "(in the log)"
        with self._errors as file:
            file.seek(0)
            return file.read()[-2000:]


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Sets variables of this process's environment for a while, and removes those that are None."""

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    before = {name: os.environ.get(name) for name in values}
    put(values)
    try:
        yield
    finally:
        put(before)


def run(
    program: str, arguments: Sequence[str], on_event: Callable[[Event], None], launch: Launcher = FreshProcess
) -> None:
    """Runs one stage to its end, and raises the error that it told."""
    process = launch(program, arguments)
    require_success(program, arguments, process, follow(process, on_event))


def follow(process: Process, on_event: Callable[[Event], None]) -> Error | None:
    """Forwards the events of a process until it ends, and returns the error among them."""
    failure: Error | None = None
    try:
        for event in process.events():
            failure = event if isinstance(event, Error) else failure
            on_event(event)
    except BaseException:  # its own process group gets no Ctrl-C
        process.kill()
        process.wait()
        raise
    return failure


def clear_staging(pid: int) -> None:
    """Removes the files that a killed chunk had staged on this machine; a pod's memory goes with the pod."""
    for place in ("/dev/shm", tempfile.gettempdir()):
        scratch.clear_left(place, pid)


def require_success(program: str, arguments: Sequence[str], process: Process, failure: Error | None) -> None:
    """Waits for a process, and raises the error that it told."""
    code, printed = process.wait(), process.output()
    if code == 0:
        return
    if failure:
        raise error_of(failure)
    number = [word for word in arguments[1:2] if word.isdigit()]  # of the chunk; files that pass a request have none
    stage = " ".join([program.rpartition(" ")[2].replace("_", " "), *number])
    ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    raise BatonError(f"{stage} {ended} without a reason; the end of its output: {printed.strip() or '(nothing)'}")


def error_of(failure: Error) -> BatonError:
    """Returns the error of a stage, to be raised here."""
    kind = SkipError if failure.skips else UserError if failure.exit_code == UserError.exit_code else BatonError
    return kind(f"{failure.stage}: {failure.message}")


def train_chunk(
    run_uri: str,
    index: int,
    on_event: Callable[[Event], None],
    launch: Launcher = FreshProcess,
    leave_out: Sequence[str] = (),
) -> None:
    """Trains a chunk of a run, begun again for each step that its guard finds."""
    arguments = [run_uri, str(index), *(word for part in leave_out for word in ("--leave-out", part))]
    through_skips(lambda: run(TRAIN_CHUNK, arguments, on_event, launch))


def prepare(recipe: Recipe, name: str, on_event: Callable[[Event], None], launch: Launcher = FreshProcess) -> Run:
    """Runs split and tokenize of a recipe, its paths absolute, and returns the run, ready for its first chunk."""
    started = Run(Storage(recipe.store.uri), name)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(load.dumps(recipe))
        file.flush()
        run(DATA_SPLIT, [file.name, name], on_event, launch)
    run(TOKENIZE, [started.uri], on_event, launch)
    return started
