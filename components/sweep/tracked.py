"""A sweep in MLflow: one run for the whole, the parent of its trials' runs; a server out of reach is a warning."""

from __future__ import annotations

from baton.components.shared.core import events
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs import links, servers, tracking
from baton.components.shared.runs.documents.sweeps import Failure, RungVerdict, SweepHead, SweepTracking, Winner
from baton.components.shared.runs.mlflow import parameters
from baton.components.shared.runs.mlflow.connection import without_credentials
from baton.components.shared.sweeps.sweep import Sweep


def parent(sweep: Sweep, recipe: Recipe) -> str | None:
    """Returns the id of the sweep's tracking run, which is made once; None where nothing is tracked."""
    tracked = sweep.read(SweepTracking)
    if tracked is None:
        tracked = _start(sweep, recipe)
        sweep.write(tracked)
    return tracked.run_id


def _start(sweep: Sweep, recipe: Recipe) -> SweepTracking:
    server = servers.of(recipe)
    if server is None or recipe.sweep is None:
        return SweepTracking()
    try:
        client = tracking.connect(server.uri)
        experiment = server.experiment(client, recipe, sweep.storage)
        tags = {"baton.sweep": sweep.name, "baton.sweep_uri": sweep.uri, **links.tags()}
        tags |= server.parent(client, experiment)
        run_id: str = client.create_run(experiment, run_name=sweep.name, tags=tags).info.run_id
        settings = recipe.sweep.model_dump(mode="json", exclude_defaults=True)
        tracking.log_params(client, run_id, parameters.of_section("sweep", settings))
        recipe_text = recipe_file.to_yaml(recipe, only_set=True)
        tracking.log_texts(events.warn, client, server.uri, run_id, {tracking.RECIPE: recipe_text})
    except Exception as error:
        events.warn(f"tracking at {without_credentials(server.uri)} is off for this sweep: {error}")
        return SweepTracking()
    return SweepTracking(mlflow=server.uri, run_id=run_id)


def log_rung(sweep: Sweep, recipe: Recipe, rung: RungVerdict, page: str, *, is_last: bool) -> None:
    """Logs the scores of a rung under the trials' names, the best of them as `best`, and the page."""
    tracked = sweep.read(SweepTracking)
    run_id = tracked.run_id if tracked else None
    uri = (tracked and tracked.mlflow) or recipe.tracking.mlflow
    if run_id is None or uri is None:
        return
    try:
        client = tracking.connect(uri)
        scores = {trial: score for trial, score in rung.scores.items() if score.value is not None}
        for trial, score in scores.items():
            client.log_metric(run_id, trial, score.value, step=score.step)
        if best := next((scores[trial] for trial in rung.kept if trial in scores), None):
            client.log_metric(run_id, "best", best.value, step=best.step)
        tracking.log_texts(events.warn, client, uri, run_id, {"sweep.html": page})
        if is_last:
            client.set_terminated(run_id)
    except Exception as error:
        events.warn(f"tracking at {without_credentials(uri)} has no scores of rung {rung.rung}: {error}")


def end_trials(sweep: Sweep, document: SweepHead, rung: RungVerdict, *, is_last: bool) -> None:
    """Ends the runs of the trials that a rung has stopped, and after the last one of all but the winner's.

    The winner's is ended by its report; one that comes back is running again with its next chunk.
    """
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
            tracking.tag(run, {"baton.stopped": why})
            tracking.close(run, "FAILED" if run.read(Failure) else "FINISHED")
