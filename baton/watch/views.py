"""Pages of a run and of a sweep while they train: the report's own pages, rendered again from what has changed."""

import datetime
import time
from dataclasses import dataclass, replace

from baton.local import begun
from baton.pages import run_page
from baton.pages.collect import collect
from baton.pages.html import duration
from baton.runs.documents import Progress
from baton.runs.outcomes import ReportPage, RunFailure, TrialEntry
from baton.runs.run import Run, Sweep, now
from baton.sweep import page as sweep_page
from baton.sweep import view as sweep_view
from baton.watch import listed
from baton.watch.listed import ListedStorage
from baton.watch.tail import Tail

FRESH_S = 20.0  # age of a note of progress up to which a chunk counts as training
# Runs of a sweep that are listed in a round, at most; those that train, and those whose turn is next, come first.
MOST_LISTED, MOST_LISTED_HERE = 16, 64
NEXT = 8


def trains(progress: Progress | None, saved: int) -> bool:
    """Tells whether a chunk trains just now, beyond the newest checkpoint's step."""
    if progress is None or progress.step <= saved or not progress.at:
        return False
    age = time.time() - datetime.datetime.fromisoformat(progress.at).timestamp()
    return age < max(FRESH_S, 3 * progress.seconds_per_step)


def idle_note(storage: ListedStorage) -> str:
    """Returns for how long nothing was written to a run or sweep that has not ended; empty for less than a minute."""
    newest = storage.modified()
    minutes = int((datetime.datetime.now(datetime.UTC) - newest).total_seconds() / 60) if newest else 0
    return f"No chunk trains just now; the store has not changed for {duration(60 * minutes)}." if minutes > 0 else ""


class RunView:
    """The page of one run."""

    def __init__(self, run: Run) -> None:
        self.storage = ListedStorage(run.storage.base_uri)
        self._run, self._tail = Run(self.storage, run.name), Tail()

    def render(self) -> str:
        self.storage.begin_round()
        run = self._run
        failure, known = run.read(RunFailure), begun.find(run.name, run.uri)
        has_ended = run.read(ReportPage) is not None
        is_stopped = bool(known and not known.endpoint and not known.process)
        report = collect(run, failure, as_of="" if has_ended or failure else now(), is_stopped=is_stopped)
        progress = run.read(Progress)
        note = ""
        if report.is_live and trains(progress, report.steps):
            log = [*report.log, *self._tail.read(run, report.steps)]
            report, note = replace(report, log=log, progress=progress), self._tail.trouble
        elif report.state == "running":
            note = idle_note(self.storage)
        return run_page.render(report, live=True, note=note)


@dataclass(frozen=True)
class _Known:
    trial: sweep_view.Trial
    progress: Progress | None
    changed: float
    is_settled: bool


class SweepView:
    """The page of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self.storage = ListedStorage(sweep.storage.base_uri)
        self._sweep, self._tail = Sweep(self.storage, sweep.name), Tail()
        self._trials: dict[str, _Known] = {}
        self._looked: dict[str, int] = {}  # trial → round in which its run was listed
        self._round = 0
        self._due: set[str] = set()
        self._view: sweep_view.View | None = None

    def render(self) -> str:
        self.storage.begin_round()
        self._round += 1
        self._due = self._chosen()
        view = self._view = sweep_view.gather(self._sweep, read=self._read, families=False)
        note = self._tail.trouble if any(trial.trains for trial in view.trials) else idle_note(self.storage)
        return sweep_page.render(view, live=True, note="" if view.is_over else note)

    def _chosen(self) -> set[str]:
        """Returns the trials whose runs are listed in this round."""
        if self._view is None:
            return set()
        order = sorted(self._view.trials, key=lambda trial: trial.id)
        at_work = [place for place, trial in enumerate(order) if trial.trains]
        coming = {(place + step) % len(order) for place in at_work for step in range(1, NEXT + 1)}

        def rank(numbered: tuple[int, sweep_view.Trial]) -> tuple[bool, bool, bool, int]:
            place, trial = numbered
            is_over = not trial.is_alive and trial.asked != "go"
            return not trial.trains, place not in coming, is_over, self._looked[trial.id]

        most = MOST_LISTED_HERE if self.storage.is_local else MOST_LISTED
        return {trial.id for _, trial in sorted(enumerate(order), key=rank)[:most]}

    def _read(self, sweep: Sweep, row: TrialEntry, with_losses: bool) -> sweep_view.Trial:
        folder, known = f"runs/{row.run}", self._trials.get(row.id)
        if known and row.id not in self._due:
            self.storage.keep(folder)
        else:
            self._looked[row.id] = self._round
        changed = self.storage.changed(folder)
        if known is None or known.changed != changed or not known.is_settled:
            is_settled = time.monotonic() - changed > listed.SETTLED_S
            progress = Run(self.storage, row.run).read(Progress)
            known = _Known(sweep_view.read_trial(sweep, row, with_losses), progress, changed, is_settled)
            self._trials[row.id] = known
        trial = replace(known.trial)
        if known.progress and trains(known.progress, trial.step):
            losses = self._tail.read(Run(self.storage, row.run), trial.step)
            trial.losses = [*trial.losses, *losses]
            trial.step, trial.trains = known.progress.step, True
        return trial
