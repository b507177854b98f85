"""Export of the trained model in the recipe's formats, each loaded back and compared before it is committed.

Committed exports are pushed to the Hugging Face Hub (or `HF_ENDPOINT`) and entered in MLflow, once each.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import time
from typing import Any

from baton import events
from baton.checkpoint import chain, seals
from baton.checkpoint.store import CheckpointStore
from baton.documents import Document
from baton.errors import BatonError, UserError
from baton.export import exportable, model_card
from baton.export.formats import FORMATS, CommittedExport, ExportDraft
from baton.export.source import ExportSource
from baton.models import chat, prompts
from baton.pages.card import Artifact, Card
from baton.recipe.evaluation import Hub
from baton.recipe.recipe import Recipe
from baton.runs import objects
from baton.runs.documents import TokenizedRows, TrackingRun
from baton.runs.outcomes import EvaluationResult, ExportedModel, ExportEntry, ModelMeta, Pushed, RegistryEntry
from baton.runs.run import Run
from baton.scratch import scratch_folder
from baton.store import bundle
from baton.store.manifest import Manifest, read_manifest
from baton.tracking import servers, tracker
from baton.tracking.client import connect, without_credentials

MAIN = "export"  # folder of the main export in a run: the whole model where it is asked for, else the adapter


@seals.sealed(objects.EXPORT)
def export_run(run_uri: str) -> ExportedModel:
    """Exports the checkpoint of a run's result, each format once."""
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.recipe()
    tokens = run.read(TokenizedRows)
    chat.set_template_date(tokens.today if tokens else None)
    exportable.check(recipe)
    exportable.check_registry(recipe, servers.server_address(run, recipe))
    with scratch_folder("export") as scratch:
        source = ExportSource(run, recipe, scratch)
        main_format = "safetensors" if "safetensors" in recipe.export.formats else "adapter"
        main = _export(source, main_format, None)
        exports = {main_format: main}
        exports |= {name: _export(source, name, main) for name in recipe.export.formats if name != main_format}
        published: dict[str, Document] = {}
        logged = exports.get("mlflow")
        if logged and (entry := log_to_mlflow(run, recipe, logged.manifest, logged.folder(), source.digest)):
            published["registry"] = entry
        if recipe.export.hub:
            published["hub"] = push_to_hub(run, recipe.export.hub, main.manifest, main.folder())
    exported = ExportedModel(
        model_uri=main.uri,
        bytes=main.manifest.bytes,
        files=len(main.manifest.files),
        exports=[
            ExportEntry(format=name, uri=export.uri, bytes=export.manifest.bytes, checked=export.meta.checked)
            for name, export in exports.items()
        ],
    ).model_copy(update=published)
    run.write(exported)
    run.record("export", {"seconds": time.time() - started})
    events.emit(events.Exported(uri=main.uri, bytes=main.manifest.bytes))
    return exported


def write_artifact(run: Run, exported: ExportedModel, artifact: Artifact) -> None:
    """Writes the model card as Kubeflow's artifact, or the model itself, with each format's address."""
    prefix = exported.model_uri.removeprefix(f"{run.storage.uri()}/").rpartition("/")[0]
    manifest = read_manifest(run.storage, prefix)
    assert manifest, exported.model_uri  # committed by the call that returned `exported`
    meta = ModelMeta.read(manifest.meta, exported.model_uri)
    facts: dict[str, str | int] = {
        "framework": model_card.LIBRARIES[meta.format],
        "format": meta.format,
        "formats": ", ".join(entry.format for entry in exported.exports),
        "bytes": exported.bytes,
        "digest": meta.digest,
        "step": meta.step,
        "address": exported.model_uri,
        "run": run.uri,
    }
    facts |= {f"address_{entry.format}": entry.uri for entry in exported.exports}
    if run.recipe().export.artifact:
        bundle.fetch(run.storage, prefix, manifest, artifact.path, in_place=False)
        Card("", facts).write_metadata(artifact)
    else:
        Card(run.storage.read(manifest.path(prefix, "README.md")).decode(), facts).write(artifact)


def _export(source: ExportSource, export_format: str, main: CommittedExport | None) -> CommittedExport:
    """Makes and checks the export in a format, unless it is there."""
    run = source.run
    settings = _settings(source, export_format, main)
    prefix = _prefix(run, f"exports/{export_format}" if main else MAIN, settings)
    manifest = bundle.undamaged(run.storage, prefix)
    if manifest is None:
        exportable.require_packages(export_format)
        target = f"{source.scratch}/{export_format}"
        os.makedirs(target)
        draft = ExportDraft(source, target, main)
        FORMATS[export_format].write(draft)
        if export_format in (*model_card.LOADING, "mlflow"):
            _write_prompting(draft)
        finding = FORMATS[export_format].check(draft)
        if export_format in model_card.LOADING:  # the formats that people open
            about = {"export_format": export_format, "target": target, "check": finding.words}
            model_card.write(run, source.recipe, source.checkpoint, source.licence, **about)
        if not FORMATS[export_format].made_of_main:  # the others hold the main export's
            public = CheckpointStore(run).signed_by
            chain.write_export(run, target, public, step=source.checkpoint.step, digest=source.digest)
        meta = ModelMeta(
            run=run.name,
            format=export_format,
            digest=source.digest,
            step=source.checkpoint.step,
            settings=settings,
            checked=finding,
        )
        # After the check, so that every export with a manifest was loaded and compared with the trained model.
        manifest, _ = bundle.publish(run.storage, prefix, target, kind="model", meta=meta.to_json())
        shutil.rmtree(target)
        events.emit(events.HandedOut(format=export_format, bytes=manifest.bytes, checked=finding.words))
    bundle.clear_others(run.storage, prefix, manifest)  # of killed attempts, after the commit
    folder = f"{source.scratch}/fetched-{export_format}"
    return CommittedExport(
        uri=run.storage.uri(manifest.path(prefix)),
        manifest=manifest,
        meta=ModelMeta.read(manifest.meta, run.storage.uri(prefix)),
        # Fetched only where another format is made of it, or a server takes it.
        folder=functools.cache(lambda: bundle.fetch(run.storage, prefix, manifest, folder)),
    )


def _prefix(run: Run, name: str, settings: str) -> str:
    """Returns an export's place, with its settings' digest where one with other settings has the name."""
    committed = bundle.undamaged(run.storage, run.path(name), most_bytes=0)
    if committed is None or ModelMeta.read(committed.meta, run.uri).settings in (None, settings):
        return run.path(name)
    return run.path(f"{name}-{settings[:8]}")


def _settings(source: ExportSource, export_format: str, main: CommittedExport | None) -> str:
    """Returns a digest of everything that decides an export's bytes."""
    spec = source.recipe.export.model_dump(mode="json")
    decisive: dict[str, object] = {name: spec[name] for name in ("licence", *FORMATS[export_format].settings)}
    decisive |= {"format": export_format, "state": source.digest}
    if main and FORMATS[export_format].made_of_main:
        decisive["main"] = main.manifest.folder
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _write_prompting(draft: ExportDraft) -> None:
    """Writes the prompt format of training to a model's folder, and adds the end of its answers to its own settings."""
    prompting = draft.source.prompting
    if prompting is None:
        return
    with open(f"{draft.target}/{prompts.FILE}", "w", encoding="utf-8") as file:
        json.dump(prompting.to_json(), file, indent=2)
    for folder, _, names in os.walk(draft.target):
        if prompting.is_chat and prompts.SETTINGS in names:
            prompts.write_ends(folder, draft.source.tokenizer)


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
            message, remedy="The export itself is committed; run the stage again when the server is reachable."
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
        assert server  # unsent metrics go to their own destination
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
    # Last, when the files are up. A model of an earlier crash is not ready; the next attempt takes again.
    client.finalize_logged_model(logged.model_id, "READY")
    if tracker.EXTERNAL in logged.tags:  # the run has ended before, without an export
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
