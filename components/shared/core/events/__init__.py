"""Events of a stage: human lines in a pod's log, JSON lines to the local engine."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

from baton.components.shared.core import machine, termination
from baton.components.shared.core.errors import BatonError, LostError, MarkedError, SkipError, in_words, no_room
from baton.components.shared.core.events.event import KINDS, Unknown
from baton.components.shared.core.events.event import Event as Event
from baton.components.shared.core.events.stages import *  # noqa: F403
from baton.components.shared.core.events.stages import Error, Stage, Warned
from baton.components.shared.core.events.training import *  # noqa: F403

MARK = "::baton "
"""Prefix of the lines that carry an event when `BATON_EVENTS=stdout`."""

logger = logging.getLogger("baton")
_one_at_a_time = threading.Lock()
_muted = threading.Event()
_hearers: list[Callable[[Event], None]] = []


def mute() -> None:
    """Emits nothing more from this process: another one speaks for it."""
    _muted.set()


def hear(hearer: Callable[[Event], None]) -> None:
    """Calls a function with each event of this process, in the thread that emits it."""
    _hearers.append(hearer)


def emit(event: Event) -> None:
    """Writes an event: a JSON line with its time for the local engine, a readable one for a pod's log."""
    for hearer in _hearers:
        hearer(event)
    if _muted.is_set():
        return
    if os.environ.get("BATON_EVENTS") == "stdout":
        with _one_at_a_time:
            sys.stdout.write(MARK + json.dumps({"event": event.kind, "at": time.time(), **event.fields()}) + "\n")
            sys.stdout.flush()
    else:
        logger.info("%s %s", event.kind, " ".join(f"{name}={value}" for name, value in event.fields().items()))


def warn(text: str) -> None:
    """Tells a person that something goes on without what it was to do: in the log and on the screen."""
    logger.warning("%s", text)
    if os.environ.get("BATON_EVENTS") == "stdout":
        emit(Warned(text))


def parse(line: str) -> Event | None:
    """Returns the event in a line of output, or None where the line is ordinary output.

    What another Baton wrote, which may be newer or older, is `Unknown` where it cannot be read as one of ours.
    """
    line = line.strip()  # the local engine indents what a stage prints
    if not line.startswith(MARK):
        return None
    try:
        fields = json.loads(line[len(MARK) :])
        kind = fields.pop("event")
    except (ValueError, AttributeError, TypeError, KeyError):  # a process that was killed as it wrote
        return None
    try:
        return KINDS[kind].read(fields)
    except (KeyError, TypeError):
        return Unknown(kind, {name: value for name, value in fields.items() if name != "at"})


def setup_logging() -> None:
    """Sends log lines to standard error with a time, and keeps the libraries' own chatter out."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logger.setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)
    setup_environment()


def setup_environment() -> None:
    """Sets what libraries read when they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    machine.settle_home()


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Runs a stage so that a known error ends the process with one message and no traceback.

    Whatever it fails of is left for Kubernetes, see `baton.components.shared.core.termination`.
    """
    setup_logging()
    os.environ.setdefault("BATON_STORE_PATIENCE", "120")  # a stage waits for its store longer than a person does
    emit(Stage(name, "started"))
    try:
        yield
        gc.freeze()  # spares the interpreter's end a last look at all that torch has imported: two seconds a process
    except Exception as failure:
        error = failure if isinstance(failure, BatonError) else no_room(failure)
        if error is None:
            message = in_words(failure)
            emit(Error(name, message, BatonError.exit_code))
            termination.leave(message, BatonError.exit_code)
            raise
        marked, lost, skips = (isinstance(error, kind) for kind in (MarkedError, LostError, SkipError))
        emit(Error(name, str(error), error.exit_code, marked, lost=lost or None, skips=skips or None))
        logger.error("%s", error)
        termination.leave(str(error), error.exit_code)
        raise SystemExit(error.exit_code) from error  # it prints no traceback, and who runs the stage can ask why
    emit(Stage(name, "done"))
