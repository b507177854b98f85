"""Display of a run on standard error: bars for running stages, one line for each that is done."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from itertools import chain
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from baton import events
from baton.kfp.processes import StageRepaired, TrialFailed
from baton.recipe.evaluation import FIGURES
from baton.terminal import Terminal

# Shown where known.
EVALUATED = ("loss", "perplexity", "accuracy", "reward", "reward_accuracy", "reward_margin", *chain(*FIGURES.values()))
PIPED = 400  # columns of a table in a pipe
TOLD_EVERY_S = 30  # lines of a running stage where no bar is drawn
console = Terminal(file=sys.stderr, highlight=False)


class Verbosity:
    """Amount of output of this process, beyond answers, warnings and errors."""

    is_quiet = False
    is_verbose = False

    @classmethod
    def reset(cls, *, quiet: bool, verbose: bool) -> None:
        cls.is_quiet, cls.is_verbose = quiet, verbose

    @classmethod
    def add(cls, *, quiet: bool, verbose: bool) -> None:
        cls.reset(quiet=cls.is_quiet or quiet, verbose=cls.is_verbose or verbose)


def screen() -> Terminal:
    """Returns a console on standard output, for the answer of a command."""
    return Terminal(highlight=False)


def print_table(table: Table) -> None:
    """Prints the answer of a command on standard output; a pipe gets each row on one line."""
    out = screen()
    if not out.is_terminal:
        out.width = max(out.width, PIPED)
    out.print(table)


def note(line: str) -> None:
    """Prints a note before a run."""
    if not Verbosity.is_quiet:
        console.print(f"[yellow]note:[/] {escape(line)}")


@dataclass
class _Running:
    """A stage that runs."""

    shown: str
    since: float
    told: float  # when its last line was printed
    task: TaskID
    note: str = ""
    training: str = ""  # step, loss and speed, kept for the line at its end
    begins: int = 0  # step at which its training began
    trained: float = 0.0  # seconds of training so far, and when the current part began; saves are left out
    trains_since: float | None = None


class _Elapsed(ProgressColumn):
    """Time that a stage without steps has taken."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total else _clock(task.elapsed or 0.0), "cyan")


class Display:
    """Follows the events of a run: a bar for each stage that runs, a line for each that is done.

    Args:
        num_chunks: Chunks of the run, without spare ones; 0 where it has several trainings.
        batch_size: Rows of a step, for the speed in tokens.
        resumes: Whether the run has begun before, so that the step it resumes from is shown.
    """

    def __init__(self, num_chunks: int, batch_size: int = 0, *, resumes: bool = False) -> None:
        self.num_chunks, self._batch_size, self._resumes = num_chunks, batch_size, resumes
        self._step_tokens = 0.0  # mean tokens of a step
        is_narrow = console.width < 100
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10 if is_narrow else 30),
            TextColumn("{task.fields[note]}", markup=False),
            _Elapsed(),
            console=console,
            disable=not console.is_terminal or Verbosity.is_quiet,
        )
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._progress.stop()

    def heard(self, event: events.Event) -> None:
        if isinstance(event, events.Phase):
            self._time(event)
        if isinstance(event, events.Stage):
            self._started(event.stage) if event.state == "started" else self._ended(event.stage)
        elif isinstance(event, events.TrainingResumed):
            if self._resumes and not Verbosity.is_quiet:
                console.print(event.text, markup=False)
            self._resumes = False  # later chunks resume from each other
        elif line := _line(event):
            if not Verbosity.is_quiet:
                console.print(line, markup=False)
        elif note := _note(event):
            if isinstance(event, events.Tokens) and event.train and self._batch_size:
                self._step_tokens = event.tokens / -(-event.train // self._batch_size)
            self._note(event, note)
        self._resumes |= isinstance(event, events.Restarted)
        if warning := _warning(event):
            console.print(warning, style="yellow", markup=False)

    def _started(self, name: str) -> None:
        self._forget(name)
        shown = self._numbered(name)
        task = self._progress.add_task(shown, total=None, note="")
        self._running[name] = _Running(shown, now := time.monotonic(), now, task)

    def _numbered(self, name: str) -> str:
        """Returns a stage's name: `train chunk 1 of 3`, and `spare chunk 4` after the last, as on Kubeflow's page."""
        number = re.fullmatch(r"(?:train chunk|checkpoint) (\d+)", name)
        if not (number and self.num_chunks):
            return name
        is_spare = int(number[1]) > self.num_chunks
        return name.replace("train", "spare") if is_spare else f"{name} of {self.num_chunks}"

    def _forget(self, name: str) -> _Running | None:
        stage = self._running.pop(name, None)
        if stage:
            self._progress.remove_task(stage.task)
        return stage

    def _note(self, event: events.Event, note: str) -> None:
        if not self._running:
            return
        now = time.monotonic()
        stage = next(reversed(self._running.values()))
        stage.note = note
        if isinstance(event, events.Step):
            live, stage.training = self._speed(stage, event, now)
            stage.note = ""  # notes after the last step are added to it
            self._progress.update(stage.task, note=live, completed=event.step, total=event.of)
        else:
            live = note
            self._progress.update(stage.task, note=note)
        if not console.is_terminal and not Verbosity.is_quiet and now - stage.told >= TOLD_EVERY_S:
            stage.told = now
            console.print(f"  {stage.shown}: {live}", markup=False)

    def _time(self, event: events.Phase) -> None:
        """Times the training of the newest stage by its phases, as the report does."""
        in_background = event.phase in ("commit", "prune") or (event.phase == "upload" and event.step is not None)
        if in_background or not self._running:
            return
        stage, now = next(reversed(self._running.values())), time.monotonic()
        if stage.trains_since is not None:
            stage.trained += now - stage.trains_since
        stage.trains_since = now if event.phase == "train" else None
        if event.phase == "restore":
            stage.begins = event.step or 0

    def _speed(self, stage: _Running, event: events.Step, now: float) -> tuple[str, str]:
        """Returns step, loss, speed and time left, for a bar and for the line at the stage's end."""
        line = [f"step {event.step}/{event.of}", f"loss {event.loss:.3f}"]
        live = [f"{event.step}/{event.of}", f"loss {event.loss:.3g}"]
        seconds = stage.trained + (0.0 if stage.trains_since is None else now - stage.trains_since)
        if event.step > stage.begins and seconds:
            rate = (event.step - stage.begins) / seconds
            if tokens := rate * self._step_tokens:
                line.append(f"{tokens:,.0f} tokens/s")
                live.append(f"{_short(tokens)} tok/s")
            live.append(f"{_clock((event.of - event.step) / rate)} left")
        return " ".join(live), ", ".join(line)

    def _ended(self, name: str) -> None:
        stage = self._forget(name)
        if stage and not Verbosity.is_quiet:
            took = time.monotonic() - stage.since
            note = ", ".join(part for part in (stage.training, stage.note) if part)
            console.print(f"✓ {stage.shown} ({took:.1f} s) {note}".rstrip(), markup=False)


def _clock(seconds: float) -> str:
    """Returns `0:41` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def _line(event: events.Event) -> str:
    match event:
        case events.Source():  # columns may have been found, not given
            return f"{event.uri} holds {event.in_words}"
        case events.Scored():
            value = "not a number" if event.value is None else f"{event.value:.6g}"
            return f"{event.trial} after chunk {event.chunk} (step {event.step}): {value}"
        case events.Rung():
            return f"rung {event.rung} of {event.of}: {', '.join(event.kept)} stay, {event.stopped} stopped"
        case _:
            return ""


def _note(event: events.Event) -> str:
    match event:
        case events.Split():
            return f"{event.train:,} rows to train on, {event.eval:,} held out, {event.rejected:,} rejected"
        case events.Tokens():
            reused = ", written before" if event.reused else ""
            chat = ", rendered as chat" if event.rendered else ""
            return f"{event.tokens:,} tokens in {event.train:,} sequences{reused}{chat}; {event.steps:,} steps"
        case events.Tokenized():
            return f"part {event.done:,} of {event.of:,}"
        case events.Resumed():
            return f"{event.parts:,} of {event.of:,} parts were written before"
        case events.Slice():
            return f"{event.files:,} of {event.of:,} files, {event.bytes / 1e6:.1f} MB"
        case events.Step():
            return f"step {event.step}/{event.of}, loss {event.loss:.3f}"
        case events.CheckpointCommitted():
            return f"step {event.step} saved{f', digest {event.digest[:12]}' if Verbosity.is_verbose else ''}"
        case events.AlreadyDone():
            return f"done before: step {event.step}"
        case events.Verified():
            return f"step {event.step} verified, {event.bytes / 1e6:.1f} MB"
        case events.Evaluating():
            return f"{event.when} training: {event.doing}, {event.done:,} of {event.of:,}"
        case events.Evaluated():
            known = [f"{name} {value:,.4g}" for name in EVALUATED if (value := event.figures.get(name)) is not None]
            known += [f"{name} not measured" for name, value in event.figures.items() if value is None]
            return f"{', '.join(known)} {event.when} training"
        case events.LrFound():
            return f"learning rate {event.learning_rate:.2g} found"
        case events.MicroBatch():
            return f"{event.size} rows per forward pass, {event.accumulation} passes per step"
        case events.Finished():
            return f"{event.reason or 'evaluation has stopped improving'}, the run ends at step {event.step}"
        case events.EndForeseen():
            return f"{event.reason}: at this pace the run ends at about step {event.step:,} of {event.of:,}"
        case events.EndDecided():
            return f"{event.reason}: stable until step {event.stable_until}, the run ends at step {event.step}"
        case events.Judged():
            return "accepted" if event.passed else f"rejected: {'; '.join(event.failed)}"
        case events.HandedOut():
            return f"{event.format}: {event.checked}"
        case events.Exported():
            return f"{event.bytes / 1e6:.1f} MB"
        case events.Phase() if event.phase in ("import", "build", "restore"):
            return event.phase
        case _:
            return ""


def _warning(event: events.Event) -> str:
    match event:
        case events.Skipped():
            return f"The checkpoint of step {event.step} is not used: {event.reason}"
        case events.Restarted():
            return (
                f"{event.reason} Chunk {event.chunk} resumes in a fresh process, {event.attempt} of {event.of} times."
            )
        case events.StepSkipped():
            rows = f" Its rows: {event.rows}." if event.rows else ""
            return f"{event.message} Chunk {event.chunk} resumes before step {event.step} and skips it.{rows}"
        case TrialFailed():
            return f"{event.trial} chunk {event.chunk} failed: {event.message}"
        case StageRepaired():
            return f"{event.stage} found damage; the run repairs it once: {event.message}"
        case events.LeftOut() | events.NoEffect():
            return f"{event.text}."
        case events.Truncation():
            return f"{event.text[:1].upper()}{event.text[1:]}."
        case events.Quality() if event.state != "ok":
            return f"{event.sentence} See {event.page}"
        case events.Consistent():
            return f"This machine differs from the checkpoint's, bits may differ: {'; '.join(event.changed)}"
        case events.Warned():
            return f"{event.text[:1].upper()}{event.text[1:]}"
        case events.StoreUnavailable():
            return f"{event.reason} Training continues; last checkpoint {event.unsaved:.0f} s ago."
        case events.StagedElsewhere():
            return f"{event.reason[:1].upper()}{event.reason[1:]}."
        case events.Partial():
            return f"{event.notice}: step {event.step} of {event.of} is saved, and the next chunk resumes from it."
        case events.NotCarried():
            return f"{event.text} {event.REMEDY}"
        case events.Rejected():
            return f"{event.count} of {event.of} rows are unusable and kept in {event.uri}; {event.first}"
        case _:
            return ""
