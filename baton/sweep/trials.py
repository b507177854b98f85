"""Trials of a sweep: made, judged and tracked.

They are drawn bracket by bracket, each with a run; the same data is split and tokenized once. On a rung they advance or
stop by their scores and by people's requests. In MLflow, a sweep is one parent run of its trials' runs; a server out of
reach is a warning.
"""

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from baton import events
from baton.checkpoint import seals
from baton.checkpoint.store import CheckpointStore
from baton.documents import Json, NamedDocument
from baton.errors import BatonError, UserError
from baton.pages import quality_page
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.sharing import share
from baton.runs import objects, outcomes
from baton.runs.documents import Progress, RunInfo
from baton.runs.outcomes import RungVerdict, SweepHead, TrialEntry, TrialFailure, TrialRequest, Winner
from baton.runs.plan import Plan, make_plan
from baton.runs.run import Run, Sweep, check_name, identity, now, with_older_keys
from baton.runtime import SYSTEM
from baton.store import sources
from baton.store.storage import Storage
from baton.sweep import search
from baton.tracking import servers, tracker, tracking_run
from baton.tracking.client import connect, without_credentials

logger = logging.getLogger("baton")

# Results of split and tokenize, which hold for every trial on the same data.
CARRIED = (*objects.CARRIED, quality_page.QUALITY)


def preparation_name(sweep: Sweep, recipe: Recipe) -> str:
    """Returns the name of the run that splits and tokenizes a trial's data: the same for the same data."""
    return _name(sweep, recipe, recipe.model_dump(mode="json"))


def _preparation_names(sweep: Sweep, trials: list[tuple[TrialEntry, Recipe]]) -> list[str]:
    """Returns for each trial the run with its data; one that an older Baton made, under its keys, is used."""
    names = []
    for _, own in trials:
        document = own.model_dump(mode="json")
        document["data"] = with_older_keys(own, document["data"])
        names.append((_name(sweep, own, document), preparation_name(sweep, own)))
    is_made = {older: Run(sweep.storage, older).read(RunInfo) is not None for older in dict(names)}
    return [older if is_made[older] else name for older, name in names]


def _name(sweep: Sweep, recipe: Recipe, document: dict[str, Any]) -> str:
    del document["model"]["from_scratch"], document["data"]["workers"], document["data"]["shards"]
    if recipe.data.csv is None:  # older preparations, from before this setting, keep their names
        del document["data"]["csv"]
    decides = [recipe.seed, document["model"], document["data"], recipe.training.method, recipe.hooks.source]
    if recipe.training.second_model:  # its digest is found with the data
        decides.append(recipe.training.second_model[1].model_dump(mode="json"))
    digest = hashlib.sha256(json.dumps([*decides, recipe.needs_all_rows is None], sort_keys=True).encode()).hexdigest()
    return f"{sweep.name}-data-{digest[:8]}"


def create_sweep(sweep: Sweep, recipe: Recipe, planned: list[search.Bracket]) -> None:
    """Writes the sweep with its first bracket's trials; one that exists must have the same recipe."""
    existing = sweep.find()
    if existing is None:
        assert recipe.sweep
        drawn = search.draw(recipe.sweep, recipe.seed, planned[0].trials)
        rungs = [
            outcomes.RungEntry(rung=rung.number, bracket=rung.bracket, chunk=rung.chunk, keep=rung.keep)
            for bracket in planned
            for rung in bracket.rungs
        ]
        head = SweepHead(
            name=sweep.name,
            created=now(),
            recipe=recipe.model_dump(mode="json"),
            metric=recipe.sweep.metric,
            mode=recipe.sweep.mode,
            rungs=rungs,
            trials=[_trial(sweep, number, 1, values) for number, values in enumerate(drawn)],
        )
        if sweep.write_new(head):
            return
        existing = sweep.document()
    before = load.stored(existing.recipe, origin=sweep.uri)
    if changed := load.changed_paths(_identity(before), _identity(recipe)):
        raise UserError(
            f"sweep {sweep.name!r} was started with another recipe: {'; '.join(changed)}.",
            remedy="Choose another name, or set these back.",
        )


def add_trials(sweep: Sweep, recipe: Recipe, planned: list[search.Bracket], bracket: search.Bracket) -> None:
    """Draws a later bracket's trials from earlier scores, unless they are drawn."""
    assert recipe.sweep
    trials = sweep.document().trials
    first = sum(before.trials for before in planned[: bracket.number - 1])
    numbers = range(first, first + bracket.trials)
    if {f"t{number:03d}" for number in numbers} <= {trial.id for trial in trials}:
        return

    def know(trial: TrialEntry) -> search.Known:
        run = sweep.run(trial)
        with seals.stage(run, objects.JUDGE, appends=False):
            scores = {score.chunk: score.value for score in sweep.scores(run) if score.value is not None}
        return search.Known(values=trial.values, scores=scores, finished=recipe.num_chunks in scores)

    known = SYSTEM.each(know, [trial for trial in trials if 1 <= trial.bracket < bracket.number])
    drawn = search.draw(recipe.sweep, recipe.seed, bracket.trials, known)
    for number, values in zip(numbers, drawn, strict=True):
        sweep.add(_trial(sweep, number, bracket.number, values))


def bracket_trials(sweep: Sweep, recipe: Recipe, bracket: int) -> list[tuple[TrialEntry, Recipe]]:
    return [
        (trial, search.configured(recipe, trial.values, f"trial {trial.id}"))
        for trial in sweep.document().trials
        if trial.bracket == bracket
    ]


def _identity(recipe: Recipe) -> Json:
    assert recipe.sweep
    return {**identity(recipe), "sweep": recipe.sweep.model_dump(mode="json", exclude={"parallel", "device"})}


def _trial(sweep: Sweep, number: int, bracket: int, values: Json) -> TrialEntry:
    name = f"t{number:03d}"
    return TrialEntry(id=name, run=f"{sweep.name}-{name}", bracket=bracket, values=values, parent=None)


def start_bracket(recipe: Recipe, name: str, bracket: int) -> tuple[Sweep, list[dict[str, str]]]:
    """Draws a bracket's trials; returns the sweep, and `recipe`, `run` and `source` of each different data to make."""
    sweep = Sweep(Storage(recipe.store.uri), check_name(name))
    planned = search.brackets(recipe)
    if bracket == 1:
        create_sweep(sweep, recipe, planned)
    else:
        add_trials(sweep, recipe, planned, planned[bracket - 1])
    # By the recipe in the store, as `create_trials` names them: the given one may have another address of the rows.
    stored = load.stored(sweep.document().recipe, origin=sweep.uri)
    names = _preparation_names(sweep, bracket_trials(sweep, stored, bracket))
    preparations: dict[str, dict[str, str]] = {}
    trials = bracket_trials(sweep, recipe, bracket)
    parent = tracking_parent(sweep, recipe)
    entries = [trial for trial, _ in trials]
    # Each is a trial before it is a run.
    SYSTEM.each(lambda trial: sweep.run(trial).write(_about(sweep, recipe, trial, parent)), entries)
    # A preparation trains nothing and is not tracked: the recipe's rate and length replace those of its trial.
    length = {f"training.{name}": getattr(recipe.training, name) for name in ("learning_rate", "epochs", "max_steps")}
    for run, (_, own) in zip(names, trials, strict=True):
        if run not in preparations:
            prepared = load.with_values(own, {**length, "tracking.mlflow": None, "budget": None})
            source = sources.as_parameter(own.model_dump(mode="json")["data"]["source"])
            preparations[run] = {"recipe": load.dumps(prepared), "run": run, "source": source}
    num_trials = planned[bracket - 1].trials
    logger.info("bracket %d has %d trials, on %d different data", bracket, num_trials, len(preparations))
    return sweep, list(preparations.values())


def _about(sweep: Sweep, recipe: Recipe, trial: TrialEntry, parent: str | None) -> outcomes.TrialInfo:
    assert recipe.sweep
    rows = {"keeps_rows": True} if recipe.sweep.sure else {}
    return outcomes.TrialInfo(
        sweep=sweep.name, id=trial.id, values=trial.values, metric=recipe.sweep.metric, tracking=parent, **rows
    )


def create_trials(sweep: Sweep, bracket: int) -> list[str]:
    """Creates the runs of a bracket's trials with their prepared data, and returns the runs' addresses."""
    recipe = load.stored(sweep.document().recipe, origin=sweep.uri)
    trials = bracket_trials(sweep, recipe, bracket)
    names, prepared, limit = _preparation_names(sweep, trials), {}, _limit(recipe)
    parent = tracking_parent(sweep, recipe)
    for name in set(names):
        data = Run(sweep.storage, name)
        with seals.stage(data, objects.ENTER, appends=False) as sealed:
            carried = {kind: data.raw(kind) for kind in CARRIED}
            prepared[name] = data.need(RunInfo).made, data.plan().rows, carried, sealed.shared()

    def enter_one(named: tuple[str, tuple[TrialEntry, Recipe]]) -> Run:
        name, (trial, own) = named
        run, (made, rows, documents, shared) = sweep.run(trial), prepared[name]
        with seals.stage(run, objects.ENTER) as ledger:
            ledger.writes |= shared
            if limit:  # what a judge has given since then stays
                before = run.read(RunInfo)
                own = load.stored(before.recipe, origin=run.uri) if before else _allowed(own, limit / len(trials))
            run.create(own, made)
            for kind, document in documents.items():
                if document is not None:
                    (run.set_once if kind in objects.IDENTITY else run.put)(kind, document)
            run.write_once(make_plan(own, rows))
            run.write(_about(sweep, recipe, trial, parent))  # again, as that was in no stage of the run
        return run

    runs = SYSTEM.each(enter_one, zip(names, trials, strict=True))
    for run, (_, own) in zip(runs, trials, strict=True):
        tracking_run.start(run, own)
        tracking_run.log_data(run, own)
    return [run.uri for run in runs]


def deal(sweep: Sweep, runs: Sequence[str], devices: int, judged: int = 0) -> list[dict[str, str]]:
    """Deals the trials of a rung, given by their runs' addresses, to at most so many devices.

    After a rung, each trial has the seconds of its newest chunk, and the longest go first, each to the device with the
    least so far: at most 4/3 of the best deal's time (Graham, 1969, "Bounds on multiprocessing timing anomalies").
    Before the first one, devices have equal numbers of trials.

    Args:
        sweep: The sweep.
        runs: The trials' runs.
        devices: Number of devices.
        judged: Number of the rung before, 0 before the first one.

    Returns:
        For each device `sweep_uri` and `trials`, their ids between spaces. Trials that may share a process are next to
        each other, so that a device loads few bases.
    """
    opened = [Run.open(uri) for uri in runs]
    ids = [run.need(outcomes.TrialInfo).id for run in opened]
    sharing = share(dict(zip(ids, SYSTEM.each(Run.resolved_recipe, opened), strict=True)))
    ordered = [trial for group in (*sharing.groups, sharing.apart) for trial in group]
    count, verdict = min(devices, len(ordered)), sweep.rung(judged) if judged else None
    scores = verdict.scores if verdict else {}
    known = {trial: score.seconds for trial, score in scores.items() if trial in ordered and score.seconds}
    if known:
        usual = fmean(known.values())  # of a trial that was resumed
        loads, dealt = [0.0] * count, [set[str]() for _ in range(count)]
        for trial in sorted(ordered, key=lambda trial: -known.get(trial, usual)):
            device = loads.index(min(loads))
            loads[device] += known.get(trial, usual)
            dealt[device].add(trial)
        shares = [[trial for trial in ordered if trial in own] for own in dealt]
    else:
        ends = [len(ordered) * at // count for at in range(count + 1)]
        shares = [ordered[first:end] for first, end in itertools.pairwise(ends)]
    return [{"sweep_uri": sweep.uri, "trials": " ".join(own)} for own in shares]


@dataclass(frozen=True, kw_only=True)
class RungResult:
    kept: list[str]  # addresses of the runs that advance, best first
    winner: str  # address of the best run so far that is trained to its end, empty before there is one


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
    # Of two with the same score, the earlier entry is ahead: the sort is stable.
    ranked = sorted(scored, key=lambda trial: sign * scored[trial])
    return ranked[:keep], ranked[keep:]


def rank_trials(sweep: Sweep, number: int) -> RungResult:
    """Judges a rung and writes the verdict, or adds new requests to one judged before; BatonError if none advances."""
    document = sweep.document()
    recipe = load.stored(document.recipe, origin=sweep.uri)
    rungs = [rung for bracket in search.brackets(recipe) for rung in bracket.rungs]
    rung = rungs[number - 1]
    trials = {trial.id: trial for trial in document.trials}
    requests = sweep.requests()
    before, spent = sweep.rung(number), {}
    if limit := _limit(recipe):
        costs = SYSTEM.each(lambda trial: _spent(sweep.run(trial)), trials.values())
        spent = dict(zip(trials, costs, strict=True))
    verdict = before or _judged(sweep, document, recipe, rung, trials, requests, spent)
    verdict = _with_requests(sweep, verdict, trials, requests)
    if not verdict.kept:
        why = "; ".join(f"{entry.id}: {entry.why}" for entry in verdict.stopped[:5]) or "none has trained"
        raise BatonError(
            f"no trial of sweep {sweep.name!r} advances from rung {number}: {why}.",
            remedy="Fix the failures, or `baton sweep resume` a trial, and start the sweep again under its name.",
        )
    # The rest in equal shares, once for the same trials: later, some have spent of theirs.
    if limit and rung.chunk < document.num_chunks and (before is None or before.kept != verdict.kept):
        share = max(limit - sum(spent.values()), 0.0) / len(verdict.kept)
        for trial in verdict.kept:
            run = sweep.run(trials[trial])
            with seals.stage(run, objects.ADOPT):
                run.create(_allowed(run.recipe(), spent[trial] + share))
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


def _limit(recipe: Recipe) -> float | None:
    """Returns the device seconds that a sweep may cost, each times its price; None without such a limit."""
    return recipe.budget.device_seconds if recipe.budget else None


def _allowed(own: Recipe, device_seconds: float) -> Recipe:
    """Returns a trial's recipe with so much of the sweep's budget."""
    assert own.budget
    return load.with_values(own, {"budget.limit": own.budget.of(device_seconds)})


def _spent(run: Run) -> float:
    """Returns the device seconds of a trial, each times its price."""
    newest, note = next(CheckpointStore(run).whole(), None), run.read(Progress)
    costs = [cost for cost in (newest and newest.meta.work, note) if cost]
    return max((cost.priced_seconds or cost.device_seconds for cost in costs), default=0.0)


def affordable(rungs: Sequence[search.PlannedRung], keep: int, per_chunk: float, rest: float) -> int:
    """Returns how many trials a budget pays for to the end, at most so many and at least one.

    Args:
        rungs: Rungs that they have still to train for.
        keep: The most.
        per_chunk: Device seconds of a chunk.
        rest: Device seconds that are left.
    """

    def cost(trials: int) -> float:
        chunks = 0
        for rung in rungs:
            chunks += trials * (rung.chunk - rung.first + 1)
            trials = min(trials, rung.keep)
        return chunks * per_chunk

    return next((trials for trials in range(keep, 1, -1) if cost(trials) <= rest), 1)


Sealed = TypeVar("Sealed", bound=NamedDocument)
Requests = dict[str, TrialRequest]  # trial → its newest request, where there is one


def _with_state(requests: Requests, state: outcomes.TrialState) -> set[str]:
    return {trial for trial, request in requests.items() if request.state == state}


def _judged(
    sweep: Sweep,
    document: SweepHead,
    recipe: Recipe,
    rung: search.PlannedRung,
    trials: dict[str, TrialEntry],
    requests: Requests,
    spent: Mapping[str, float],
) -> RungVerdict:
    def read(trial: str, kind: type[Sealed]) -> Sealed | None:
        run = sweep.run(trials[trial])
        with seals.stage(run, objects.JUDGE, appends=False):
            return run.read(kind, rung.chunk)

    assert recipe.sweep
    sure = recipe.sweep.sure
    entered = sweep.entered(document, rung.number)
    read_scores = SYSTEM.each(lambda trial: read(trial, outcomes.TrialScore), entered)
    scores = {trial: score for trial, score in zip(entered, read_scores, strict=True) if score}
    stopped = _with_state(requests, "stop").intersection(entered)
    values = {trial: score.value for trial, score in scores.items()}
    kept, beaten = decide(entered, values, rung.keep, document.mode, stopped)
    differences = {}
    if sure and kept and beaten:
        rows = {trial: read(trial, outcomes.TrialRows) for trial in (kept[-1], *beaten)}
        differences = compare(kept[-1], rows, document.mode, sure, recipe.seed)
    ended = {trial: _asked(trial, requests[trial]) for trial in stopped}
    ranked, is_last = len(kept) + len(beaten), rung.chunk == document.num_chunks
    most = ranked
    told: dict[str, Any] = {"differences": differences} if differences else {}
    if (limit := _limit(recipe)) and recipe.budget:
        told["spent"] = f"{recipe.budget.cost(sum(spent.values()))} of {recipe.budget.limit}"
        later = [each for bracket in search.brackets(recipe) for each in bracket.rungs if each.number > rung.number]
        per_chunk = sum(spent[trial] for trial in entered) / max(len(entered) * rung.chunk, 1)
        if kept and not is_last:
            most = affordable(later, ranked, per_chunk, limit - sum(spent.values()))
            kept, beaten = kept[:most], [*kept[most:], *beaten]
    top = len(kept)
    for place, trial in enumerate(beaten, top + 1):
        why, difference = f"place {place} of {ranked}, top {top} kept", differences.get(trial)
        advances = place <= rung.keep or (sure and difference and difference.confidence < sure and not is_last)
        if advances and len(kept) < most:
            kept.append(trial)
            continue
        if advances:
            why += f"; {told['spent']} spent, and the rest pays for {most}"
        if sure:
            why += f"; {difference.in_words if difference else 'not compared by rows'}"
        ended[trial] = outcomes.StoppedTrial(id=trial, why=why, cause="beaten", place=place, of=ranked)
    for trial in (trial for trial in entered if trial not in kept and trial not in ended):
        if trial in scores:
            ended[trial] = outcomes.StoppedTrial(id=trial, why=f"{document.metric} is not a number", cause="not_finite")
            continue
        failure, why = sweep.run(trials[trial]).read(TrialFailure), f"chunk {rung.chunk} was not finished"
        if failure and failure.chunk <= rung.chunk:
            why = f"chunk {failure.chunk} failed: {failure.message}"
        ended[trial] = outcomes.StoppedTrial(id=trial, why=why, cause="failed")
    return RungVerdict(
        rung=rung.number,
        bracket=rung.bracket,
        chunk=rung.chunk,
        scores={
            trial: outcomes.RungScore(value=score.value, step=score.step, seconds=score.seconds)
            for trial, score in scores.items()
        },
        kept=kept,
        stopped=[ended[trial] for trial in entered if trial in ended],
        **told,
        at=now(),
    )


def compare(
    against: str, rows: Mapping[str, outcomes.TrialRows | None], mode: str, sure: float, seed: int
) -> dict[str, outcomes.TrialDifference]:
    """Returns how much worse trials are than another over the same held-out rows, drawn alike for both.

    Args:
        against: The other trial.
        rows: Of each trial its held-out rows. One with other rows is left out.
        mode: `min` or `max`: direction of the score.
        sure: Share of draws inside an interval.
        seed: Decides the draws.
    """
    import numpy as np

    from baton.models import bootstrap

    other, sign = rows[against], 1 if mode == "min" else -1
    differences = {}
    for trial, own in rows.items():
        if trial == against or other is None or own is None:
            continue
        if (own.data, len(own.values)) != (other.data, len(other.values)):
            continue
        columns = [
            column
            for each in (own, other)
            for column in (np.multiply(each.values, each.weights), np.asarray(each.weights))
        ]
        statistics = np.column_stack(columns)
        # The first draw is of each row once: the difference itself.
        sums = np.vstack([statistics.sum(0), bootstrap.resampled(statistics, seed)])
        with np.errstate(divide="ignore", invalid="ignore"):
            worse = sign * (sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3])
        if np.isfinite(worse).all():
            differences[trial] = outcomes.TrialDifference(
                against=against,
                value=float(worse[0]),
                interval=np.quantile(worse[1:], [(1 - sure) / 2, (1 + sure) / 2]).tolist(),
                confidence=float((worse[1:] > 0).mean()),
            )
    return differences


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


def _winner(
    sweep: Sweep, mode: str, rungs: Sequence[search.PlannedRung], trials: dict[str, TrialEntry], requests: Requests
) -> str | None:
    """Returns the best trial that is trained to its end, and writes it."""
    ended = [verdict for rung in rungs if rung.chunk == rungs[-1].chunk and (verdict := sweep.rung(rung.number))]
    values = {trial: score.value for verdict in ended for trial, score in verdict.scores.items()}
    best, _ = decide(list(values), values, 1, mode, _with_state(requests, "stop"))
    if not best:
        return None
    sweep.write(Winner(id=best[0], run=trials[best[0]].run, value=values[best[0]], at=now()))
    return best[0]


def _asked(trial: str, request: TrialRequest) -> outcomes.StoppedTrial:
    return outcomes.StoppedTrial(id=trial, why=f"asked to stop: {request.why}", cause="asked")


def tracking_parent(sweep: Sweep, recipe: Recipe) -> str | None:
    """Returns the id of the sweep's tracking run, made once; None where nothing is tracked."""
    tracked = sweep.read(outcomes.SweepTracking)
    if tracked is None:
        tracked = _start_tracking(sweep, recipe)
        sweep.write(tracked)
    return tracked.run_id


def _start_tracking(sweep: Sweep, recipe: Recipe) -> outcomes.SweepTracking:
    server = servers.server_of(recipe)
    if server is None or recipe.sweep is None:
        return outcomes.SweepTracking()
    try:
        client = connect(server.uri)
        experiment = server.experiment(client, recipe, sweep.storage)
        tags = {"baton.sweep": sweep.name, "baton.sweep_uri": sweep.uri, **servers.kubeflow_tags()}
        tags |= server.parent(client, experiment)
        run_id: str = client.create_run(experiment, run_name=sweep.name, tags=tags).info.run_id
        settings = recipe.sweep.model_dump(mode="json", exclude_defaults=True)
        tracking_run.log_params(client, run_id, tracker.section_params("sweep", settings))
        recipe_text = load.to_yaml(recipe, only_set=True)
        tracking_run.log_texts(events.warn, client, server.uri, run_id, {tracking_run.RECIPE: recipe_text})
    except Exception as error:
        events.warn(f"tracking at {without_credentials(server.uri)} is off for this sweep: {error}")
        return outcomes.SweepTracking()
    return outcomes.SweepTracking(mlflow=server.uri, run_id=run_id)


def log_rung(sweep: Sweep, recipe: Recipe, rung: RungVerdict, page: str, *, is_last: bool) -> None:
    """Logs a rung's scores under the trials' names, the best one as `best`, and the page."""
    tracked = sweep.read(outcomes.SweepTracking)
    run_id = tracked.run_id if tracked else None
    uri = (tracked and tracked.mlflow) or recipe.tracking.mlflow
    if run_id is None or uri is None:
        return
    try:
        client = connect(uri)
        scores = {trial: score for trial, score in rung.scores.items() if score.value is not None}
        for trial, score in scores.items():
            client.log_metric(run_id, trial, score.value, step=score.step)
        if best := next((scores[trial] for trial in rung.kept if trial in scores), None):
            client.log_metric(run_id, "best", best.value, step=best.step)
        tracking_run.log_texts(events.warn, client, uri, run_id, {"sweep.html": page})
        if is_last:
            client.set_terminated(run_id)
    except Exception as error:
        events.warn(f"tracking at {without_credentials(uri)} has no scores of rung {rung.rung}: {error}")


def end_trials(sweep: Sweep, document: SweepHead, rung: RungVerdict, *, is_last: bool) -> None:
    """Ends the tracking runs of a rung's stopped trials, and after the last rung of all but the winner."""
    # The winner's ends with its report; a resumed trial's runs again with its next chunk.
    tracked = sweep.read(outcomes.SweepTracking)
    if tracked is None or tracked.run_id is None:
        return
    ended = {entry.id: entry.why for entry in rung.stopped}
    if is_last:
        winner = sweep.read(Winner)
        last = [sweep.rung(entry.rung) for entry in document.rungs if entry.chunk == document.num_chunks]
        trained = [trial for verdict in last if verdict for trial in verdict.kept]
        ended |= {trial: "another trial was better" for trial in trained if not winner or trial != winner.id}
    for trial in document.trials:
        if why := ended.get(trial.id):
            run = sweep.run(trial)
            tracking_run.tag(run, {"baton.stopped": why})
            tracking_run.close(run, "FAILED" if run.read(TrialFailure) else "FINISHED")
