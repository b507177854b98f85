"""A rung of a sweep: which trials advance, which are stopped, and what people have asked for in the meantime."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton import events
from baton.errors import BatonError
from baton.recipe import load
from baton.runs.outcomes import (
    RungScore,
    RungVerdict,
    StoppedTrial,
    SweepHead,
    TrialEntry,
    TrialFailure,
    TrialRequest,
    TrialScore,
    Winner,
)
from baton.runs.plan import Plan
from baton.runs.run import now
from baton.runs.sweep import Sweep
from baton.runtime import SYSTEM
from baton.sweep import page as sweep_page
from baton.sweep import tracking as tracked
from baton.sweep.search import PlannedRung, brackets
from baton.tracking import tracking_run


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """The runs that advance from a rung, and the winner of the last.

    Attributes:
        kept: Addresses of the runs that advance, the best first.
        winner: Address of the best run of all so far that is trained to its end, empty before there is one.
    """

    kept: list[str]
    winner: str


def decide(
    entered: Sequence[str], values: Mapping[str, float | None], keep: int, mode: str, stopped: Collection[str]
) -> tuple[list[str], list[str]]:
    """Ranks trials. Of two with the same score, the one that entered first is ahead.

    Args:
        entered: Trials that trained for this rung.
        values: Trial → score; one without, or with one that is no finite number, cannot advance.
        keep: How many advance.
        mode: `min` or `max`.
        stopped: Trials that somebody has asked to stop.

    Returns:
        Those that advance, the best first, and all others that were ranked, in their order.
    """
    sign = 1 if mode == "min" else -1
    scored = {
        trial: value
        for trial in entered
        if trial not in stopped and (value := values.get(trial)) is not None and math.isfinite(value)
    }
    ranked = sorted(scored, key=lambda trial: sign * scored[trial])
    return ranked[:keep], ranked[keep:]


def rank_trials(sweep: Sweep, number: int) -> RungResult:
    """Compares the trials of a rung and writes what comes of it.

    A rung that was judged before stands; only what people have asked for since is taken up.

    Raises:
        BatonError: no trial has a score.
    """
    document = sweep.document()
    recipe = load.validate(document.recipe, origin=sweep.uri)
    rungs = [rung for bracket in brackets(recipe) for rung in bracket.rungs]
    rung = rungs[number - 1]
    trials = {trial.id: trial for trial in document.trials}
    wishes = dict(zip(trials, SYSTEM.each(sweep.control, trials), strict=True))
    committed = sweep.rung(number)
    verdict = committed or _judged(sweep, document, rung, trials, wishes)
    verdict = _with_wishes(sweep, verdict, trials, wishes)
    if not verdict.kept:
        why = "; ".join(f"{entry.id}: {entry.why}" for entry in verdict.stopped[:5]) or "none has trained"
        raise BatonError(
            f"no trial of sweep {sweep.name!r} advances from rung {number}: {why}.",
            remedy="Mend what failed, or `baton sweep resume` a trial, and start the sweep again under its name.",
        )
    # Before all that follows from it: a judge that is started again after a crash finds the same verdict.
    sweep.keep_rung(verdict)
    for run in (sweep.run(trials[trial]) for trial in verdict.kept if trials[trial].bracket == 0):
        tracking_run.start(run, run.recipe())  # a fork has joined, which no bracket has begun
    winner = _winner(sweep, document.mode, rungs, trials, wishes)
    events.emit(
        events.Rung(rung=number, of=len(rungs), chunk=rung.chunk, kept=verdict.kept, stopped=len(verdict.stopped))
    )
    return RungResult(
        kept=[sweep.run(trials[trial]).uri for trial in verdict.kept],
        winner=sweep.run(trials[winner]).uri if winner else "",
    )


def publish(sweep: Sweep, number: int) -> str:
    """Writes the sweep's page again once a rung is judged, sends both to where metrics go, and returns the page."""
    document, rung = sweep.document(), sweep.rung(number)
    assert rung is not None
    recipe = load.validate(document.recipe, origin=sweep.uri)
    page = sweep_page.write(sweep)
    is_last = number == len(document.rungs)
    tracked.log_rung(sweep, recipe, rung, page, is_last=is_last)
    tracked.end_trials(sweep, document, rung, is_last=is_last)
    return page


def _judged(
    sweep: Sweep,
    document: SweepHead,
    rung: PlannedRung,
    trials: dict[str, TrialEntry],
    wishes: Mapping[str, TrialRequest | None],
) -> RungVerdict:
    """Returns a rung's document as the scores have it."""
    entered = _entered(sweep, rung, trials)
    read = SYSTEM.each(lambda trial: sweep.run(trials[trial]).read(TrialScore, rung.chunk), entered)
    scores = dict(zip(entered, read, strict=True))
    values = {trial: score.value for trial, score in scores.items() if score}
    stopped = {trial for trial in entered if _wish(wishes, trial) == "stop"}
    kept, beaten = decide(entered, values, rung.keep, document.mode, stopped)
    ended = {trial: _asked(trial, wishes[trial]) for trial in stopped}
    ranked = len(kept) + len(beaten)
    for place, trial in enumerate(beaten, len(kept) + 1):
        why = f"number {place} of {ranked}, and {len(kept)} went on"
        ended[trial] = StoppedTrial(id=trial, why=why, cause="beaten", place=place, of=ranked)
    for trial in (trial for trial in entered if trial not in kept and trial not in ended):
        if scores[trial]:
            ended[trial] = StoppedTrial(id=trial, why=f"{document.metric} is not a number", cause="not_finite")
        else:
            ended[trial] = StoppedTrial(id=trial, why=_no_score(sweep, trials[trial], rung.chunk), cause="failed")
    return RungVerdict(
        rung=rung.number,
        bracket=rung.bracket,
        chunk=rung.chunk,
        scores={
            trial: RungScore(value=score.value, step=score.step, seconds=score.seconds)
            for trial, score in scores.items()
            if score
        },
        kept=kept,
        stopped=[ended[trial] for trial in entered if trial in ended],
        at=now(),
    )


def _with_wishes(
    sweep: Sweep,
    verdict: RungVerdict,
    trials: dict[str, TrialEntry],
    wishes: Mapping[str, TrialRequest | None],
) -> RungVerdict:
    """Returns a rung's document with the trials that somebody has asked for among those that advance."""
    gone = [trial for trial in verdict.kept if _wish(wishes, trial) == "stop"]
    asked = [trial for trial in trials if _wish(wishes, trial) == "go" and trial not in verdict.kept]
    asked = [trial for trial in asked if sweep.run(trials[trial]).read(Plan) is not None]
    stopped = [entry for entry in verdict.stopped if entry.id not in asked]
    stopped += [_asked(trial, wishes[trial]) for trial in gone]
    remaining = [trial for trial in verdict.kept if trial not in gone] + asked
    return verdict.model_copy(update={"kept": remaining, "stopped": stopped})


def _entered(sweep: Sweep, rung: PlannedRung, trials: dict[str, TrialEntry]) -> list[str]:
    """Returns the trials that trained for a rung."""
    if rung.first == 1:
        return [trial for trial, entry in trials.items() if entry.bracket == rung.bracket]
    before = sweep.rung(rung.number - 1)
    if before is None:
        raise BatonError(f"rung {rung.number - 1} of sweep {sweep.name!r} was not judged.")
    return [trial for trial in before.kept if trial in trials]


def _winner(
    sweep: Sweep,
    mode: str,
    rungs: Sequence[PlannedRung],
    trials: dict[str, TrialEntry],
    wishes: Mapping[str, TrialRequest | None],
) -> str | None:
    """Returns the best of the trials that have come to their end, and notes it with the sweep."""
    ended = [verdict for rung in rungs if rung.chunk == rungs[-1].chunk and (verdict := sweep.rung(rung.number))]
    values = {trial: score.value for verdict in ended for trial, score in verdict.scores.items()}
    stopped = {trial for trial in values if _wish(wishes, trial) == "stop"}
    best, _ = decide(list(values), values, 1, mode, stopped)
    if not best:
        return None
    sweep.write(Winner(id=best[0], run=trials[best[0]].run, value=values[best[0]], at=now()))
    return best[0]


def _no_score(sweep: Sweep, trial: TrialEntry, chunk: int) -> str:
    failure = sweep.run(trial).read(TrialFailure)
    if failure and failure.chunk <= chunk:
        return f"chunk {failure.chunk} failed: {failure.message}"
    return f"chunk {chunk} was not finished"


def _wish(wishes: Mapping[str, TrialRequest | None], trial: str) -> str | None:
    wish = wishes.get(trial)
    return wish.state if wish else None


def _asked(trial: str, wish: TrialRequest | None) -> StoppedTrial:
    return StoppedTrial(id=trial, why=f"asked to stop: {wish.why if wish else ''}", cause="asked")
