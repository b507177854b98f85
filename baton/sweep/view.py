"""Content of a sweep's page, read from the store, with its trials ranked."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.checkpoint.store import CheckpointStore, LogEntry
from baton.documents import Json
from baton.runs import lineage
from baton.runs.documents import PodLoss
from baton.runs.outcomes import RungVerdict, TrialEntry, TrialFailure, TrialState, Winner
from baton.runs.plan import Plan
from baton.runs.run import Run, Sweep
from baton.runtime import SYSTEM

MAX_CURVES = 200  # trials whose losses are read for the curves; the page has only the scores of the others
BEGUN = {"checkpoints", "progress.json", "records", "scores"}  # entries of a run's folder that its first chunk makes
STATES = {
    "won": "winner",
    "goes on": "advances",
    "ended": "trained to its end",
    "stopped": "stopped",
    "failed": "failed",
    "training": "trains",
    "waiting": "has not begun",
}


@dataclass
class Trial:
    id: str
    run: str
    values: Json
    scores: list[tuple[int, float]] = field(default_factory=list)  # step and score after each chunk, ascending
    losses: list[LogEntry] = field(default_factory=list)
    chunk: int = 0  # last one with a score
    step: int = 0  # last one that is known to be trained
    num_steps: int | None = None
    num_chunks: int | None = None
    seconds: float = 0.0
    state: str = "waiting"  # one of `STATES`
    rung: int = 0  # last one that it reached, 0 before the first
    why: str = ""
    # Place and number of trials on that rung, where others were better; an older sweep has it in `why` alone.
    beaten: tuple[int, int] | None = None
    rank: int | None = None  # from 1; None without a score
    parent: Json | None = None  # run and step of a fork's origin
    report: bool = False
    asked: TrialState | None = None  # newest request
    trains: bool = False  # just now, as far as a page that lives knows

    @property
    def score(self) -> float | None:
        return self.scores[-1][1] if self.scores else None

    @property
    def is_alive(self) -> bool:
        return self.state not in ("stopped", "failed")


@dataclass
class View:
    name: str
    uri: str
    created: str
    metric: str
    mode: str
    parameters: list[str]
    trials: list[Trial]
    rungs: list[RungVerdict]  # judged so far, of `num_rungs`
    num_rungs: int
    gpus: int  # accelerators of a trial, at most
    families: lineage.Family  # trials that are forks, with their relatives
    lost_pods: Sequence[PodLoss] = ()  # after which Kubeflow's run was started again

    @property
    def is_over(self) -> bool:
        return bool(self.rungs) and len(self.rungs) >= self.num_rungs

    @property
    def best(self) -> Trial | None:
        return self.trials[0] if self.trials and self.trials[0].rank else None


@dataclass(frozen=True)
class Cost:
    """Of the training so far, and (`_all`) of all trials to their ends; None where it is not known."""

    steps: int
    steps_all: int | None
    seconds: float
    seconds_all: float | None
    gpu_hours: float
    gpu_hours_all: float | None


ReadTrial = Callable[[Sweep, TrialEntry, bool], Trial]


def gather(sweep: Sweep, *, with_losses: bool = True, read: ReadTrial | None = None, families: bool = True) -> View:
    """Reads a sweep; `families` reads the other runs of its store, where a trial is a fork."""
    document, rungs, read = sweep.document(), sweep.rungs(), read or read_trial
    recipe: Mapping[str, Any] = document.recipe
    winner = sweep.read(Winner)
    drawn = [trial.id for trial in document.trials[: MAX_CURVES if with_losses else 0]]
    trials = SYSTEM.each(lambda row: read(sweep, row, row.id in drawn), document.trials)
    requests = sweep.requests()
    for trial in trials:
        trial.asked = requests[trial.id].state if trial.id in requests else None
    _judge(trials, rungs, winner.id if winner else None, len(document.rungs))
    # First by progress, then by score; a score that is no number comes last.
    sign = 1 if document.mode == "min" else -1
    scored = {
        trial.id: sign * trial.score for trial in trials if trial.score is not None and math.isfinite(trial.score)
    }
    trials.sort(
        key=lambda trial: (
            (False, trial.state != "won", -trial.chunk, scored[trial.id], trial.id)
            if trial.id in scored
            else (True, trial.state == "failed", 0, 0.0, trial.id)
        )
    )
    for rank, trial in enumerate(trials[: len(scored)], 1):
        trial.rank = rank
    choices: Mapping[str, Any] = (recipe.get("sweep") or {}).get("parameters") or {}
    resources: Mapping[str, Any] = recipe.get("resources") or {}
    nodes = resources.get("nodes", 1)
    paths = list(dict.fromkeys([*choices, *(path for trial in trials for path in trial.values)]))
    return View(
        name=document.name,
        uri=sweep.uri,
        created=document.created,
        metric=document.metric,
        mode=document.mode,
        parameters=paths,
        trials=trials,
        rungs=rungs,
        num_rungs=len(document.rungs),
        gpus=int(resources.get("gpus", 0)) * int(nodes["max"] if isinstance(nodes, dict) else nodes),
        families=_families(sweep, trials) if families else {},
        lost_pods=sweep.lost_pods(),
    )


def cost(view: View) -> Cost:
    """Returns the cost so far, and of all trials to their ends, each at its own pace."""
    steps = sum(trial.step for trial in view.trials)
    seconds = sum(trial.seconds for trial in view.trials)
    length = max((trial.num_steps for trial in view.trials if trial.num_steps), default=None)
    pace = seconds / steps if steps else None
    steps_all = sum(trial.num_steps or length or 0 for trial in view.trials) if length else None
    seconds_all = None
    if pace is not None and length:
        seconds_all = sum(
            (trial.num_steps or length) * (trial.seconds / trial.step if trial.step and trial.seconds else pace)
            for trial in view.trials
        )
    hours = view.gpus / 3600
    return Cost(steps, steps_all, seconds, seconds_all, seconds * hours, seconds_all * hours if seconds_all else None)


def read_trial(sweep: Sweep, row: TrialEntry, with_losses: bool) -> Trial:
    """Returns a trial as its run tells, without a rung's verdict."""
    run = Run(sweep.storage, row.run)
    trial = Trial(row.id, row.run, row.values, parent=row.parent)
    present = set(sweep.storage.list(run.path()))
    plan = run.read(Plan) if Plan.NAME in present else None
    trial.num_steps = plan.num_steps if plan else None
    trial.num_chunks = len(plan.targets) if plan else None
    trial.report = "report.html" in present
    scores = sweep.scores(run) if "scores" in present else []
    scores.sort(key=lambda score: score.step)
    trial.scores = [(score.step, score.value) for score in scores if score.value is not None]
    trial.seconds = sum(score.seconds or 0.0 for score in scores)
    trial.step = max((score.step for score in scores), default=0)
    trial.chunk = max((score.chunk for score in scores), default=0)
    if failure := run.read(TrialFailure) if TrialFailure.NAME in present else None:
        trial.state, trial.why = "failed", f"chunk {failure.chunk} failed: {failure.message}"
    elif BEGUN & present:
        trial.state = "training"
    if with_losses and "checkpoints" in present:
        trial.losses = _losses(CheckpointStore(run))
        trial.step = max(trial.step, *(int(entry["step"]) for entry in trial.losses), 0)
    return trial


def _losses(store: CheckpointStore) -> list[LogEntry]:
    for checkpoint in store.committed():
        try:
            return [entry for entry in store.history(checkpoint) if entry.get("loss") is not None]
        except FileNotFoundError:  # retention was faster
            continue
    return []


def _judge(trials: list[Trial], rungs: list[RungVerdict], winner: str | None, num_rungs: int) -> None:
    by_id = {trial.id: trial for trial in trials}
    for rung in rungs:
        for name in rung.kept:
            if trial := by_id.get(name):
                trial.rung, trial.why, trial.beaten = rung.rung, "", None
                trial.state = "ended" if _has_ended(trial) else "goes on"
        for entry in rung.stopped:
            if trial := by_id.get(entry.id):
                trial.rung, trial.why = rung.rung, entry.why
                trial.beaten = (entry.place, entry.of) if entry.place and entry.of else None
                trial.state = "failed" if rung.has_failed(entry) else "ended" if _has_ended(trial) else "stopped"
    if winner in by_id and len(rungs) >= num_rungs:
        by_id[winner].state = "won"


def _has_ended(trial: Trial) -> bool:
    # After early stopping, the score of the last chunk tells.
    if trial.num_steps is None or trial.num_chunks is None:
        return False
    return trial.step >= trial.num_steps or trial.chunk >= trial.num_chunks


def _families(sweep: Sweep, trials: list[Trial]) -> lineage.Family:
    if not any(trial.parent for trial in trials):
        return {}
    members = lineage.family(sweep.storage)
    families: lineage.Family = {}
    for trial in trials:
        if trial.parent and trial.run in members and trial.run not in families:
            families |= lineage.relatives(members, trial.run)
    return families
