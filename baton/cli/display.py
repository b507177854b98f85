"""Display of a run: a line per stage, a bar for training. On standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton import events
from baton.local.processes import StageRepaired, TrialFailed
from baton.terminal import Terminal

EVALUATED = ("loss", "perplexity", "accuracy", "reward", "reward_accuracy", "reward_margin")  # shown where known
PIPED = 400  # columns of a table in a pipe
console = Terminal(file=sys.stderr, highlight=False)


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
    console.print(f"[yellow]note:[/] {escape(line)}")


class Display:
    """Follows the events of a run; a terminal gets bars, a log file gets lines."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks  # 0 where the run has several trainings
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._stage: TaskID | None = None
        self._name = ""
        self._since = 0.0
        self._note = ""

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._progress.stop()

    def heard(self, event: events.Event) -> None:
        if isinstance(event, events.Stage):
            self._started(event.stage) if event.state == "started" else self._ended()
        elif line := _line(event):
            console.print(line, markup=False)
        elif note := _note(event):
            self._note = note
            if self._stage is not None:
                completed, total = (event.step, event.of) if isinstance(event, events.Step) else (None, None)
                self._progress.update(self._stage, note=note, completed=completed, total=total)
        if warning := _warning(event):
            console.print(warning, style="yellow", markup=False)

    def _started(self, name: str) -> None:
        self._name, self._since, self._note = name, time.monotonic(), ""
        is_of_chunk = self._num_chunks and name.startswith(("train chunk", "checkpoint"))
        shown = f"{name} of {self._num_chunks}" if is_of_chunk else name
        self._stage = self._progress.add_task(shown, total=None, note="")

    def _ended(self) -> None:
        if self._stage is not None:
            self._progress.update(self._stage, total=1, completed=1)
        if not console.is_terminal:
            took = time.monotonic() - self._since
            console.print(f"✓ {self._name} ({took:.1f} s) {self._note}".rstrip(), markup=False)


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
            return f"{event.parts:,} of {event.of:,} parts are there already"
        case events.Slice():
            return f"{event.files:,} of {event.of:,} files, {event.bytes / 1e6:.1f} MB"
        case events.Step():
            return f"step {event.step}/{event.of}, loss {event.loss:.3f}"
        case events.CheckpointCommitted():
            return f"step {event.step} committed, digest {event.digest[:12]}"
        case events.AlreadyDone():
            return f"step {event.step} is committed already"
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
            return f"evaluation has stopped improving, the run ends at step {event.step}"
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
        case events.SkippedExport():
            return f"{event.uri} is not used and made anew: {event.reason}"
        case TrialFailed():
            return f"{event.trial} chunk {event.chunk} failed: {event.message}"
        case StageRepaired():
            return f"{event.stage} found damage, and the run goes back once to make it anew: {event.message}"
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
            return f"{event.reason} Training continues; nothing has been saved for {event.unsaved:.0f} s."
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
