"""Export of the trained model in the recipe's formats, each loaded back and compared before it is committed."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import time

from baton import events
from baton.documents import Document
from baton.export import exportable, model_card, publish
from baton.export.formats import FORMATS, CommittedExport, ExportDraft
from baton.export.source import ExportSource
from baton.models import chat, prompts
from baton.pages.card import Artifact, Card
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.outcomes import ExportedModel, ExportEntry, ModelMeta
from baton.runs.run import Run
from baton.scratch import scratch_folder
from baton.store import bundle
from baton.store.manifest import mark_damaged, read_manifest, usable_manifest
from baton.tracking import servers

MAIN = "export"  # folder of the main export in a run: the whole model where it is asked for, else the adapter


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
        published = _publish(source, recipe, main, exports.get("mlflow"))
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
    manifest = usable_manifest(run.storage, prefix)
    if manifest and (problems := bundle.verify(run.storage, prefix, manifest)):
        mark_damaged(run.storage, prefix, manifest)
        events.emit(events.SkippedExport(uri=run.storage.uri(prefix), reason="; ".join(problems)))
        manifest = None
    if manifest is None:
        exportable.require_packages(export_format)
        target = f"{source.scratch}/{export_format}"
        os.makedirs(target)
        draft = ExportDraft(source, target, main)
        FORMATS[export_format].write(draft)
        if export_format in (*model_card.LOADING, "mlflow"):
            _write_prompting(draft)
        finding = FORMATS[export_format].check(draft)
        if export_format in model_card.LOADING:  # the formats that people look at
            about = {"export_format": export_format, "target": target, "check": finding.words}
            model_card.write(run, source.recipe, source.checkpoint, source.licence, **about)
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
    committed = usable_manifest(run.storage, run.path(name))
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
    """Writes beside a model how it was asked in training, and adds the end of its answers to its own settings."""
    prompting = draft.source.prompting
    if prompting is None:
        return
    with open(f"{draft.target}/{prompts.FILE}", "w", encoding="utf-8") as file:
        json.dump(prompting.to_json(), file, indent=2)
    for folder, _, names in os.walk(draft.target):
        if prompting.is_chat and prompts.SETTINGS in names:
            prompts.write_ends(folder, draft.source.tokenizer)


def _publish(
    source: ExportSource, recipe: Recipe, main: CommittedExport, mlflow: CommittedExport | None
) -> dict[str, Document]:
    published: dict[str, Document] = {}
    if mlflow and (there := publish.log_to_mlflow(source.run, recipe, mlflow.manifest, mlflow.folder(), source.digest)):
        published["registry"] = there
    if recipe.export.hub:
        published["hub"] = publish.push_to_hub(source.run, recipe.export.hub, main.manifest, main.folder())
    return published
