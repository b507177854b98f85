"""What a person sees of a run on Kubeflow: a line per stage as it ends, one live line below. On standard error."""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import replace
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.cli.display import console
from baton.kubeflow import run_status
from baton.kubeflow.connection import Client, KubeflowRun
from baton.kubeflow.run_status import GOING_ON, RunStatus, StageStatus
from baton.kubeflow.submit import FINAL_STATES

EXPLAIN_EVERY_S = 30.0
"""Seconds between two looks at the pods of a run that still runs."""

MARKS = {"SUCCEEDED": "[green]✓[/]", "FAILED": "[red]✗[/]", "CANCELED": "[red]✗[/]", "SKIPPED": "[dim]–[/]"}


class Follow:
    """Follows a run; a terminal gets a live line, a log file gets the lines of the stages alone."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("stages"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._line = self._progress.add_task("waiting for the first stage", total=None)
        self._told: set[tuple[tuple[str, ...], str]] = set()
        self._explained_at = -EXPLAIN_EVERY_S
        self.view = RunStatus([])
        """The run as last explained."""

    def __enter__(self) -> Follow:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._progress.stop()

    def seen(self, client: Client, run: KubeflowRun) -> None:
        """Shows what has changed since the run was last looked at."""
        stages = run_status.stages(client, run)
        now = time.monotonic()
        is_due = now - self._explained_at >= EXPLAIN_EVERY_S or run.state in FINAL_STATES
        if is_due or any(self._is_new(stage, run_status.BROKEN) for stage in stages):
            self._explained_at = now
            was_frozen = self.view.is_frozen
            self.view = run_status.explained_by_store(client, run, stages)
            stages = self.view.stages
            if self.view.is_frozen and not was_frozen:
                console.print(f"[yellow]{run_status.FROZEN}[/]", soft_wrap=True)
        elif self.view.is_frozen:  # what is listed is what was then
            stages = self.view.stages
        for stage in stages:
            if self._is_new(stage, MARKS):
                self._told.add((stage.path, stage.state))
                console.print(line(stage), soft_wrap=True)
            elif stage.state in GOING_ON and stage.hint and (stage.path, stage.hint) not in self._told:
                self._told.add((stage.path, stage.hint))
                console.print(f"[yellow]{escape(f'{stage.name}: {stage.message}. {stage.hint}')}[/]", soft_wrap=True)
        running = ", ".join(stage.name for stage in stages if stage.state in GOING_ON)
        ended = sum(stage.state in MARKS for stage in stages)
        self._progress.update(self._line, description=running or "waiting", completed=ended, total=len(stages) or None)

    def _is_new(self, stage: StageStatus, states: Container[str]) -> bool:
        return stage.state in states and (stage.path, stage.state) not in self._told


def line(stage: StageStatus) -> str:
    """Returns a stage that has ended on one line, in rich's markup."""
    took = f" ({stage.seconds:.0f} s)" if stage.seconds is not None and stage.state != "SKIPPED" else ""
    reason = f": {stage.message}" if stage.message and stage.state in run_status.BROKEN else ""
    skipped = " (skipped)" if stage.state == "SKIPPED" else ""
    return f"{MARKS[stage.state]} {escape(f'{stage.name}{took}{skipped}{reason}')}"


def table(stages: list[StageStatus], *, is_over: bool) -> Table:
    """Returns the stages of a run as a table, in which equal neighbours share a row.

    Args:
        stages: As `run_status.stages` returns them.
        is_over: Whether the run has ended, so that what waits will not run.
    """
    shown = Table("stage", "state", "time", "message", box=None, pad_edge=False)
    for stage in _folded(stages):
        state = ("not run" if is_over else "waiting") if stage.state == "WAITING" else stage.state.lower()
        took = f"{stage.seconds:.0f} s" if stage.seconds is not None and stage.state != "SKIPPED" else ""
        colour = "red" if stage.state in run_status.BROKEN else "green" if stage.state == "SUCCEEDED" else ""
        shown.add_row(
            escape(stage.name), f"[{colour}]{state}[/]" if colour else state, took, escape(stage.message or "")
        )
    return shown


def _folded(stages: list[StageStatus]) -> list[StageStatus]:
    """Returns stages in which equal ones of one kind are one, `train chunk 26–100`, where their numbers follow."""
    rows: list[StageStatus] = []
    newest: dict[str, tuple[int, StageStatus, str, int]] = {}
    for stage in stages:
        kind, _, text = stage.name.rpartition(" ")
        number = int(text) if text.isdecimal() and stage.seconds is None else None
        place, first = len(rows), text
        if number is not None:
            if (last := newest.get(kind)) and last[3] == number - 1 and _look(last[1]) == _look(stage):
                place, _, first, _ = last
            newest[kind] = place, stage, first, number
        if place < len(rows):
            rows[place] = replace(stage, name=f"{kind} {first}–{number}")
        else:
            rows.append(stage)
    return rows


def _look(stage: StageStatus) -> tuple[str, str | None, str | None]:
    return stage.state, stage.message, stage.hint
