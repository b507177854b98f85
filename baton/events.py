"""Events of a stage: their classes, their log and JSON lines, and the termination message of its pod.

Each event is a frozen dataclass, written as its kind and its fields. People read a line in the pod's log, and the
local engine reads JSON. The exit code is part of the termination message, as Kubeflow's launcher always exits with 1.
"""

import contextlib
import gc
import json
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, dataclass_transform

from baton import machine
from baton.errors import BatonError, ProcessLostError, RewritableDamageError, SkipError, in_words, no_room

KINDS: dict[str, "type[Event]"] = {}  # kind on the wire → its event


@dataclass_transform(frozen_default=True)
class Event:
    kind: str  # name on the wire

    def __init_subclass__(cls, kind: str = "") -> None:
        dataclass(frozen=True)(cls)
        if kind:
            cls.kind = kind
            KINDS[kind] = cls

    def fields(self) -> dict[str, object]:
        # A field with a default is younger than its event, or not always known: None is left out.
        optional = type(self)
        return {name: value for name, value in vars(self).items() if value is not None or not hasattr(optional, name)}

    def __str__(self) -> str:
        """Returns the event as a log has it."""
        return f"{self.kind} {' '.join(f'{name}={value}' for name, value in self.fields().items())}"

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the event without unknown fields, which another Baton wrote; TypeError where one is missing."""
        return cls(**{name: fields[name] for name in cls.__match_args__ if name in fields})  # type: ignore[attr-defined]


class Unknown(Event):
    """Event of another Baton, of a kind or with fields that this one does not know."""

    kind: str
    values: dict[str, object]

    def fields(self) -> dict[str, object]:
        return self.values


class Stage(Event, kind="stage"):
    stage: str
    state: str


class Error(Event, kind="error"):
    stage: str
    message: str
    exit_code: int
    marked: bool | None = None  # a second attempt makes the damaged objects again
    lost: bool | None = None  # a fresh process may be spared it
    skips: bool | None = None  # a fresh process skips the step


class Warned(Event, kind="warned"):
    text: str


class Source(Event, kind="source"):
    uri: str
    format: str
    columns: Mapping[str, str | list[str]]
    unused: list[str] | None = None

    @property
    def in_words(self) -> str:
        became = ", ".join(
            ours if ours == theirs else f"{ours} ← {theirs if isinstance(theirs, str) else ' + '.join(theirs)}"
            for ours, theirs in self.columns.items()
        )
        unused = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        told = f" ({became}{unused})" if unused or became not in ("", "text", "messages") else ""
        return f"rows of {self.format}{told}"


class Rejected(Event, kind="rejected"):
    count: int
    of: int
    first: str
    uri: str


class Quality(Event, kind="quality"):
    state: str
    sentence: str
    page: str


class Split(Event, kind="split"):
    format: str
    rows: int
    train: int
    eval: int
    test: int
    rejected: int


class Resumed(Event, kind="resumed"):
    parts: int
    of: int


class Tokenized(Event, kind="tokenized"):
    part: str
    done: int
    of: int


class Truncation(Event, kind="truncation"):
    """More rows than allowed are longer than a sequence."""

    text: str
    over: int
    rows: int
    longest: int
    fixed: bool


class LeftOut(Event, kind="left_out"):
    """The chat template does not write all that the rows hold."""

    text: str
    counts: dict[str, int]


class NoEffect(Event, kind="no_effect"):
    """A setting, or a part of the rows, changes nothing in this run."""

    text: str


class Tokens(Event, kind="tokens"):
    reused: bool
    steps: int
    targets: list[int]
    tokens: int
    truncated: int
    dropped: int
    train: int
    eval: int
    test: int | None = None
    bytes: int | None = None
    lengths: dict[str, object] | None = None
    order: str | None = None
    dropped_uri: str | None = None
    rendered: str | None = None  # how texts became turns of a conversation
    rendered_row: str | None = None  # an example; None where the recipe wants counts alone
    refused: int | None = None
    left_out: dict[str, int] | None = None


class LrFound(Event, kind="lr_found"):
    learning_rate: float


class Verified(Event, kind="verified"):
    step: int
    bytes: int
    digest: str


class Evaluating(Event, kind="evaluating"):
    when: str
    doing: str
    done: int
    of: int


class Evaluated(Event, kind="evaluated"):
    # Each figure is a field of its own on the wire, so both methods differ from Event's.
    when: str
    figures: Mapping[str, float | None]

    def fields(self) -> dict[str, object]:
        return {"when": self.when, **self.figures}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        return cls(fields["when"], {name: value for name, value in fields.items() if name not in ("when", "at")})


class Judged(Event, kind="judged"):
    passed: bool
    failed: list[str]


class HandedOut(Event, kind="handed_out"):
    """A format is exported."""

    format: str
    bytes: int
    checked: str  # comparison with the trained model, in words


class Exported(Event, kind="exported"):
    uri: str
    bytes: int


class ReportWritten(Event, kind="report"):
    uri: str


class Looked(Event, kind="looked"):
    decision: str
    words: str
    run: str


class Queued(Event, kind="queued"):
    behind: str
    since: str


class Retraining(Event, kind="retraining"):
    """Outcome of a retraining, also kept in the store."""

    # `unchanged`, `busy` (dropped: another one is under way), `promoted`, `rejected` by the gate, or `failed`.
    state: str
    words: str
    at: str
    run: str | None = None
    run_uri: str | None = None
    report_uri: str | None = None
    summary: str | None = None
    gate: list[dict[str, Any]] | None = None  # each condition of the gate in words, and whether it held
    model_uri: str | None = None
    bill: str | None = None  # of a run with a budget


class Prepares(Event, kind="prepares"):
    # Inputs of split and tokenize for each data of a bracket: `recipe`, `run` and `source`.
    preparations: list[dict[str, str]]


class Entered(Event, kind="entered"):
    runs: list[str]


class Rung(Event, kind="rung"):
    rung: int
    of: int
    chunk: int
    kept: list[str]
    stopped: int


class Verdict(Event, kind="verdict"):
    kept: list[str]
    winner: str


class Phase(Event, kind="phase"):
    phase: str  # one of `baton.runs.documents.StagePhase`, which begins
    step: int | None = None
    chunk: int | None = None
    target: int | None = None
    processes: int | None = None
    rows: int | None = None


class Slice(Event, kind="slice"):
    """A chunk has fetched its files of training rows."""

    files: int
    of: int
    bytes: int


class MicroBatch(Event, kind="micro_batch"):
    """Result of `training.micro_batch_size: auto`."""

    size: int
    accumulation: int
    found_by: str


class Step(Event, kind="step"):
    step: int
    of: int
    loss: float


class StagedElsewhere(Event, kind="staging"):
    """Checkpoints are staged elsewhere than before."""

    place: str
    reason: str


class Superseded(Event, kind="superseded"):
    """A checkpoint made way for a newer one."""

    step: int


class StoreUnavailable(Event, kind="store_unavailable"):
    """A checkpoint cannot be saved for now; `unsaved` is the seconds since one was."""

    step: int
    unsaved: float
    reason: str


class CheckpointCommitted(Event, kind="checkpoint"):
    step: int
    uri: str
    digest: str
    bytes: int
    seconds: dict[str, float]  # of upload and commit


class Skipped(Event, kind="skipped"):
    """A checkpoint is damaged and not used."""

    step: int
    reason: str


class Consistent(Event, kind="consistent"):
    """This machine differs from the checkpoint's, so bits may differ."""

    changed: list[str]


class NotCarried(Event, kind="not_carried"):
    """A checkpoint lacks state of the user's code: the next chunk resumes without it."""

    step: int
    lost: dict[str, str]  # place → reason

    REMEDY: ClassVar[str] = (
        "Give its class state_dict and load_state_dict, or set `stateless = True` on it where training does not depend "
        "on it."
    )

    @property
    def text(self) -> str:
        places = "; ".join(f"state of `{name}` is not carried: {why}" for name, why in self.lost.items())
        return f"{places[:1].upper()}{places[1:]}. Chunks that resume from step {self.step} are only consistent."


class Restored(Event, kind="restored"):
    step: int
    wrong: list[str]  # parts of the state in memory that differ from the checkpoint's


class TrainingResumed(Event, kind="training_resumed"):
    """A chunk trains from a checkpoint, or from the beginning; `repeated` steps were trained before, and lost."""

    chunk: int
    step: int
    repeated: int

    @property
    def text(self) -> str:
        start = f"resumed from step {self.step:,}" if self.step else "started again from the beginning"
        first, last = self.step + 1, self.step + self.repeated
        steps = f"steps {first:,} {'and' if self.repeated == 2 else 'to'} {last:,} are"
        again = f"step {first:,} is" if self.repeated == 1 else steps
        return f"{start}; {again} repeated" if self.repeated else start


class Scored(Event, kind="scored"):
    trial: str
    chunk: int
    step: int
    value: float | None  # None for one that is not finite


class Turn(Event, kind="turn"):
    """A chunk of a trial among others in its process, `started` or `done`."""

    trial: str
    chunk: int
    state: str


class AlreadyDone(Event, kind="already_done"):
    chunk: int
    step: int  # its last


class Restarted(Event, kind="restarted"):
    """A chunk's process was lost; a fresh one resumes from the newest checkpoint."""

    chunk: int
    attempt: int
    of: int
    reason: str


class StepSkipped(Event, kind="step_skipped"):
    """A step is undone: the chunk resumes from the checkpoint before it, and skips it."""

    step: int
    chunk: int
    message: str
    rows: str


class Partial(Event, kind="partial"):
    """A chunk stops before its target."""

    chunk: int
    step: int
    of: int
    notice: str


class Finished(Event, kind="finished"):
    """Evaluation has stopped improving, or the run has reached its budget's last step."""

    chunk: int
    step: int
    reason: str | None = None  # setting of the budget that has ended it


class EndForeseen(Event, kind="end_foreseen"):
    """At the pace so far, the budget ends the run at about a step."""

    step: int
    of: int
    reason: str


class EndDecided(Event, kind="end_decided"):
    """The run will end for its budget at a step; the learning rate is stable until another."""

    step: int
    stable_until: int
    reason: str


class Stopped(Event, kind="stopped"):
    """A chunk of a trial that was stopped trains nothing."""

    chunk: int
    step: int


# Environment variable: the container's `terminationMessagePath`, where that is not Kubernetes' default.
TERMINATION_LOG = "BATON_TERMINATION_LOG"
MAX_TERMINATION_BYTES = 4096  # Kubernetes keeps no more of a container's message

_EXIT_CODE = re.compile(r" \(baton exit code (\d+)\)$")


def write_termination_message(message: str, exit_code: int) -> None:
    """Writes a message for Kubernetes; outside a pod nothing."""
    path = os.environ.get(TERMINATION_LOG, "/dev/termination-log")
    if not os.path.exists(path):
        return
    words = " ".join(message.split()).encode()
    code = f" (baton exit code {exit_code})".encode()
    room = MAX_TERMINATION_BYTES - len(code)
    if len(words) > room:  # the middle goes: the finding is at the beginning, the remedy at the end
        half = room // 2 - 2
        words = words[:half] + "…".encode() + words[-half:]
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(words.decode(errors="ignore").encode() + code)


def read_termination_message(text: str) -> tuple[str, int | None]:
    """Returns a stage's message and its exit code, None where it has left none."""
    match = _EXIT_CODE.search(text)
    return (text[: match.start()], int(match[1])) if match else (text, None)


MARK = "::baton "  # prefix of the lines that carry an event when `BATON_EVENTS=stdout`

logger = logging.getLogger("baton")
_one_at_a_time = threading.Lock()
_muted = threading.Event()
_hearers: list[Callable[[Event], None]] = []


def mute() -> None:
    """Emits nothing more from this process: another one emits its events."""
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
        logger.info("%s", event)


def warn(text: str) -> None:
    """Warns a person, in the log and on the screen."""
    logger.warning("%s", text)
    if os.environ.get("BATON_EVENTS") == "stdout":
        emit(Warned(text))


def parse(line: str) -> Event | None:
    """Returns the event in a line of output; None for ordinary output, `Unknown` for an event of another Baton."""
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
    """Sets the variables that libraries read at import."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a log gets a line for every move of a bar
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    machine.settle_home()


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Runs a stage; a known error ends the process with one message, also left for Kubernetes, and no traceback."""
    setup_logging()
    os.environ.setdefault("BATON_STORE_PATIENCE", "120")  # a stage waits for its store longer than a person does
    emit(Stage(name, "started"))
    try:
        yield
        gc.freeze()  # spares the interpreter's end a last scan of all that torch has imported: two seconds a process
    except Exception as failure:
        error = failure if isinstance(failure, BatonError) else no_room(failure)
        if error is None:
            message = in_words(failure)
            emit(Error(name, message, BatonError.exit_code))
            write_termination_message(message, BatonError.exit_code)
            raise
        marked, lost, skips = (isinstance(error, kind) for kind in (RewritableDamageError, ProcessLostError, SkipError))
        emit(Error(name, str(error), error.exit_code, marked, lost=lost or None, skips=skips or None))
        logger.error("%s", error)
        write_termination_message(str(error), error.exit_code)
        raise SystemExit(error.exit_code) from error  # prints no traceback, and keeps the cause for the caller
    emit(Stage(name, "done"))
