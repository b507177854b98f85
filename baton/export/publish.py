"""Push of an export to the Hugging Face Hub (or `HF_ENDPOINT`), and its entry in MLflow, once each."""

from __future__ import annotations

import os
import shutil
from typing import Any

from baton.errors import BatonError, UserError
from baton.recipe.evaluation import Hub
from baton.recipe.recipe import Recipe
from baton.runs.documents import TrackingRun
from baton.runs.outcomes import EvaluationResult, Pushed, RegistryEntry
from baton.runs.run import Run
from baton.scratch import scratch_folder
from baton.store.manifest import Manifest
from baton.tracking import servers, tracker
from baton.tracking.client import connect, without_credentials

VERSION_TAG = "baton.export"  # of a registered version: its export, by which the stage finds it when run again


def push_to_hub(run: Run, spec: Hub, manifest: Manifest, folder: str) -> Pushed:
    """Pushes the files of an export, unless the run has noted that they were."""
    done = run.read(Pushed)
    if done and (done.repo, done.revision, done.export) == (spec.repo, spec.revision, manifest.folder):
        return done
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise UserError(
            f"export.hub.repo: nothing can be pushed to {spec.repo} without HF_TOKEN in the environment.",
            remedy="Set it to a token that may write there; in a cluster by resources.secret_env.",
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # of its own client

    api = HfApi(token=token)
    try:
        api.create_repo(spec.repo, private=spec.private, exist_ok=True)
        if spec.revision != "main":
            api.create_branch(spec.repo, branch=spec.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=spec.repo, folder_path=folder, revision=spec.revision, commit_message=f"Baton run {run.name}"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = " ".join(str(error.server_message or error).split())[:200].replace(token, "…")
        if status in (401, 403, 404):
            raise UserError(
                f"export.hub.repo: the Hub refuses a push to {spec.repo} ({status}): {reason}",
                remedy="Check the name of the repository and that HF_TOKEN may write to it.",
            ) from None
        raise BatonError(f"the push to {spec.repo} failed ({status}): {reason}", remedy="Run again.") from None
    except ValueError as error:
        raise UserError(
            f"export.hub.repo: a push to {spec.repo} is refused: {' '.join(str(error).split())[:300]}",
            remedy="If it is for the licence: the Hub knows licences by names such as apache-2.0 (export.licence).",
        ) from None
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200].replace(token, "…")
        raise BatonError(
            f"the Hub cannot be reached for a push to {spec.repo}: {type(error).__name__}: {reason}",
            remedy="The export itself is committed; run again.",
        ) from None
    pushed = Pushed(repo=spec.repo, revision=spec.revision, export=manifest.folder, commit=str(commit.oid))
    run.write(pushed)
    return pushed


def log_to_mlflow(run: Run, recipe: Recipe, manifest: Manifest, folder: str, digest: str) -> RegistryEntry | None:
    """Logs an MLflow model and registers it, each at most once for the same files; None without a server."""
    tracked = run.read(TrackingRun)
    server = servers.server_address(run, recipe)
    run_id = tracked.run_id if tracked else None
    if server is None:
        return None
    # Not `run.read`: the document's `version` is the model's, not that of its form.
    logged = RegistryEntry.model_validate(run.raw(RegistryEntry.NAME) or {})
    if logged.export != manifest.folder:
        logged = RegistryEntry(export=manifest.folder, mlflow=server)
    tags = {VERSION_TAG: manifest.folder, "baton.run": run.name, "baton.run_uri": run.uri, "baton.digest": digest}
    try:
        client = connect(server, timeout="60", retries="2")  # files of a model take longer than figures
        if (model_id := logged.model_id) is None:
            model_id = _log_files(client, folder, _logged_model(client, run, recipe, run_id, tags), run_id)
            logged = logged.model_copy(update={"model_id": model_id})
            run.write(logged)  # at once, so that a crash below does not log the files twice
        if name := recipe.export.registered_model:
            version = _register(client, name, model_id, run_id, tags)
            logged = logged.model_copy(update={"name": name, "version": version})
            run.write(logged)
            evaluation = run.read(EvaluationResult)
            if recipe.export.alias and evaluation and evaluation.gate and evaluation.gate.passed:
                client.set_registered_model_alias(name, recipe.export.alias, version)
                logged = logged.model_copy(update={"alias": recipe.export.alias})
                run.write(logged)
    except Exception as error:
        message = f"MLflow at {server} did not take the model: {type(error).__name__}: {error}"
        message = without_credentials(" ".join(message.split()))[:400]
        if recipe.export.registered_model is None:  # else a version was to be made there
            run.warn(message)
            return None
        raise BatonError(
            message, remedy="The export itself is committed; run the stage again when the server can be had."
        ) from None
    return logged


def _logged_model(client: Any, run: Run, recipe: Recipe, run_id: str | None, tags: dict[str, str]) -> Any:
    """Returns the logged model for the files: training's own with its metrics, where that has none yet."""
    from mlflow.entities import LoggedModelOutput

    newest = tracker.newest_model(client, run_id) if run_id else None
    if newest is not None and tracker.has_no_files(newest):
        client.set_logged_model_tags(newest.model_id, tags)
        return newest
    about = tracker.model_of(run, recipe)
    if run_id:
        experiment = str(client.get_run(run_id).info.experiment_id)
    else:
        server = servers.server_of(recipe)
        assert server  # what is not tracked yet goes to where it would be
        experiment = server.experiment(client, recipe, run.storage)
    made = client.create_logged_model(experiment, about.name, run_id, {**about.tags, **tags}, model_type=about.kind)
    if run_id:
        client.log_outputs(run_id, [LoggedModelOutput(made.model_id, step=0)])
    return made


def _log_files(client: Any, folder: str, logged: Any, run_id: str | None) -> str:
    """Logs the files as they were checked; only `MLmodel` gets the ids."""
    from mlflow.models import Model

    with scratch_folder("mlflow") as scratch:
        copied = shutil.copytree(os.path.abspath(folder), f"{scratch}/model", copy_function=os.symlink)
        about = Model.load(folder)
        about.model_id, about.model_uuid, about.run_id = logged.model_id, logged.model_id, run_id
        about.artifact_path = logged.artifact_location
        os.unlink(f"{copied}/MLmodel")
        about.save(f"{copied}/MLmodel")
        client.log_model_artifacts(logged.model_id, copied)
    # Last, when the files are up. A crash before leaves a model that is not ready, which the next attempt takes again.
    client.finalize_logged_model(logged.model_id, "READY")
    if tracker.EXTERNAL in logged.tags:  # the run has come to its end before, without an export
        client.delete_logged_model_tag(logged.model_id, tracker.EXTERNAL)
    return str(logged.model_id)


def _register(client: Any, name: str, model_id: str, run_id: str | None, tags: dict[str, str]) -> str:
    """Returns the number of this export's version, made unless it is there."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # An attempt may have died between making a version and noting it: the server knows it by its tag.
    for version in client.search_model_versions(f"tags.`{VERSION_TAG}` = '{tags[VERSION_TAG]}'"):
        if version.name == name:
            return str(version.version)
    made = client.create_model_version(name, f"models:/{model_id}", run_id=run_id, tags=tags, model_id=model_id)
    return str(made.version)
