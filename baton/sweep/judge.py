"""Judgement of a rung: trials advance or stop by their scores and by people's requests."""

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
    TrialState,
    Winner,
)
from baton.runs.plan import Plan
from baton.runs.run import now
from baton.runs.sweep import Sweep
from baton.runtime import SYSTEM
from baton.sweep.search import PlannedRung, brackets
from baton.tracking import tracking_run


@dataclass(frozen=True, kw_only=True)
class RungResult:
    kept: list[str]
    """Addresses of the runs that advance, best first."""
    winner: str
    """Address of the best run so far that is trained to its end, empty before there is one."""


def decide(
    entered: Sequence[str], values: Mapping[str, float | None], keep: int, mode: str, stopped: Collection[str]
) -> tuple[list[str], list[str]]:
    """Returns the trials that advance, best first, and the others with a finite score; those to stop are left out."""
    sign = 1 if mode == "min" else -1
    scored = {
        trial: value
        for trial in entered
        if trial not in stopped and (value := values.get(trial)) is not None and math.isfinite(value)
    }
    # Of two with the same score, the one that entered first is ahead: the sort is stable.
    ranked = sorted(scored, key=lambda trial: sign * scored[trial])
    return ranked[:keep], ranked[keep:]


def rank_trials(sweep: Sweep, number: int) -> RungResult:
    """Judges a rung and writes the verdict, or adds new requests to one judged before; BatonError if none advances."""
    document = sweep.document()
    recipe = load.validate(document.recipe, origin=sweep.uri)
    rungs = [rung for bracket in brackets(recipe) for rung in bracket.rungs]
    rung = rungs[number - 1]
    trials = {trial.id: trial for trial in document.trials}
    newest = zip(trials, SYSTEM.each(sweep.request, trials), strict=True)
    requests = {trial: request for trial, request in newest if request}
    verdict = sweep.rung(number) or _judged(sweep, document, rung, trials, requests)
    verdict = _with_requests(sweep, verdict, trials, requests)
    if not verdict.kept:
        why = "; ".join(f"{entry.id}: {entry.why}" for entry in verdict.stopped[:5]) or "none has trained"
        raise BatonError(
            f"no trial of sweep {sweep.name!r} advances from rung {number}: {why}.",
            remedy="Mend what failed, or `baton sweep resume` a trial, and start the sweep again under its name.",
        )
    # Before everything that follows from it: a judge that restarts after a crash finds the same verdict.
    sweep.write(verdict, verdict.rung)
    for run in (sweep.run(trials[trial]) for trial in verdict.kept if trials[trial].bracket == 0):
        tracking_run.start(run, run.recipe())  # of a fork, which no bracket has begun
    winner = _winner(sweep, document.mode, rungs, trials, requests)
    events.emit(
        events.Rung(rung=number, of=len(rungs), chunk=rung.chunk, kept=verdict.kept, stopped=len(verdict.stopped))
    )
    return RungResult(
        kept=[sweep.run(trials[trial]).uri for trial in verdict.kept],
        winner=sweep.run(trials[winner]).uri if winner else "",
    )


Requests = dict[str, TrialRequest]
"""Trial → its newest request, where there is one."""


def _with_state(requests: Requests, state: TrialState) -> set[str]:
    return {trial for trial, request in requests.items() if request.state == state}


def _judged(
    sweep: Sweep, document: SweepHead, rung: PlannedRung, trials: dict[str, TrialEntry], requests: Requests
) -> RungVerdict:
    entered = _entered(sweep, rung, trials)
    read = SYSTEM.each(lambda trial: sweep.run(trials[trial]).read(TrialScore, rung.chunk), entered)
    scores = {trial: score for trial, score in zip(entered, read, strict=True) if score}
    stopped = _with_state(requests, "stop").intersection(entered)
    values = {trial: score.value for trial, score in scores.items()}
    kept, beaten = decide(entered, values, rung.keep, document.mode, stopped)
    ended = {trial: _asked(trial, requests[trial]) for trial in stopped}
    ranked = len(kept) + len(beaten)
    for place, trial in enumerate(beaten, len(kept) + 1):
        why = f"number {place} of {ranked}, and {len(kept)} went on"
        ended[trial] = StoppedTrial(id=trial, why=why, cause="beaten", place=place, of=ranked)
    for trial in (trial for trial in entered if trial not in kept and trial not in ended):
        if trial in scores:
            ended[trial] = StoppedTrial(id=trial, why=f"{document.metric} is not a number", cause="not_finite")
            continue
        failure, why = sweep.run(trials[trial]).read(TrialFailure), f"chunk {rung.chunk} was not finished"
        if failure and failure.chunk <= rung.chunk:
            why = f"chunk {failure.chunk} failed: {failure.message}"
        ended[trial] = StoppedTrial(id=trial, why=why, cause="failed")
    return RungVerdict(
        rung=rung.number,
        bracket=rung.bracket,
        chunk=rung.chunk,
        scores={
            trial: RungScore(value=score.value, step=score.step, seconds=score.seconds)
            for trial, score in scores.items()
        },
        kept=kept,
        stopped=[ended[trial] for trial in entered if trial in ended],
        at=now(),
    )


def _with_requests(
    sweep: Sweep, verdict: RungVerdict, trials: dict[str, TrialEntry], requests: Requests
) -> RungVerdict:
    """Returns a verdict with people's requests to stop or resume applied."""
    to_stop, to_go = _with_state(requests, "stop"), _with_state(requests, "go")
    gone = [trial for trial in verdict.kept if trial in to_stop]
    asked = [trial for trial in trials if trial in to_go and trial not in verdict.kept]
    asked = [trial for trial in asked if sweep.run(trials[trial]).read(Plan) is not None]
    stopped = [entry for entry in verdict.stopped if entry.id not in asked]
    stopped += [_asked(trial, requests[trial]) for trial in gone]
    remaining = [trial for trial in verdict.kept if trial not in gone] + asked
    return verdict.model_copy(update={"kept": remaining, "stopped": stopped})


def _entered(sweep: Sweep, rung: PlannedRung, trials: dict[str, TrialEntry]) -> list[str]:
    if rung.first == 1:
        return [trial for trial, entry in trials.items() if entry.bracket == rung.bracket]
    before = sweep.rung(rung.number - 1)
    if before is None:
        raise BatonError(f"rung {rung.number - 1} of sweep {sweep.name!r} was not judged.")
    return [trial for trial in before.kept if trial in trials]


def _winner(
    sweep: Sweep, mode: str, rungs: Sequence[PlannedRung], trials: dict[str, TrialEntry], requests: Requests
) -> str | None:
    """Returns the best trial that is trained to its end, and writes it."""
    ended = [verdict for rung in rungs if rung.chunk == rungs[-1].chunk and (verdict := sweep.rung(rung.number))]
    values = {trial: score.value for verdict in ended for trial, score in verdict.scores.items()}
    best, _ = decide(list(values), values, 1, mode, _with_state(requests, "stop"))
    if not best:
        return None
    sweep.write(Winner(id=best[0], run=trials[best[0]].run, value=values[best[0]], at=now()))
    return best[0]


def _asked(trial: str, request: TrialRequest) -> StoppedTrial:
    return StoppedTrial(id=trial, why=f"asked to stop: {request.why}", cause="asked")
