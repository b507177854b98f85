"""A sweep in MLflow: one parent run of its trials' runs; a server out of reach is a warning."""

from __future__ import annotations

from baton import events
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import RungVerdict, SweepHead, SweepTracking, TrialFailure, Winner
from baton.runs.sweep import Sweep
from baton.tracking import servers, tracker, tracking_run
from baton.tracking.client import connect, without_credentials


def parent(sweep: Sweep, recipe: Recipe) -> str | None:
    """Returns the id of the sweep's tracking run, made once; None where nothing is tracked."""
    tracked = sweep.read(SweepTracking)
    if tracked is None:
        tracked = _start(sweep, recipe)
        sweep.write(tracked)
    return tracked.run_id


def _start(sweep: Sweep, recipe: Recipe) -> SweepTracking:
    server = servers.server_of(recipe)
    if server is None or recipe.sweep is None:
        return SweepTracking()
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
        return SweepTracking()
    return SweepTracking(mlflow=server.uri, run_id=run_id)


def log_rung(sweep: Sweep, recipe: Recipe, rung: RungVerdict, page: str, *, is_last: bool) -> None:
    """Logs a rung's scores under the trials' names, the best one as `best`, and the page."""
    tracked = sweep.read(SweepTracking)
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
    tracked = sweep.read(SweepTracking)
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
