"""Export: the trained model in the recipe's formats, each compared before its commit, and its artifact."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import time

from baton import events
from baton.documents import Document
from baton.export import exportable, publish
from baton.export.formats import FORMATS, MADE_OF_MAIN, Draft, Export, write_card, write_prompting
from baton.export.model_card import LIBRARIES
from baton.export.source import ExportSource
from baton.models import chat
from baton.pages.card import Artifact, Card
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.outcomes import ExportedModel, ExportEntry, ModelMeta
from baton.runs.run import Run
from baton.scratch import scratch_folder
from baton.store import bundle
from baton.store.manifest import Manifest, mark_damaged, read_manifest, usable_manifest
from baton.tracking import servers

# --- What export leaves in Kubeflow: the model card, or the model itself, with the address of each format.


def write_artifact(run: Run, exported: ExportedModel, artifact: Artifact) -> None:
    """Writes the artifact of a model that is exported.

    Args:
        run: The run.
        exported: What `export_run` returned.
        artifact: As kfp gives it to the stage.

    Raises:
        BatonError: the disk has no room for the files, or they are no longer what was committed.
    """
    prefix = exported.model_uri.removeprefix(f"{run.storage.uri()}/").rpartition("/")[0]
    manifest = read_manifest(run.storage, prefix)
    assert manifest, exported.model_uri  # committed by the call that returned `exported`
    meta = ModelMeta.read(manifest.meta, exported.model_uri)
    facts: dict[str, str | int] = {
        "framework": LIBRARIES[meta.format],
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
        Card("", facts).tell(artifact)
    else:
        Card(run.storage.read(manifest.path(prefix, "README.md")).decode(), facts).leave(artifact)


# --- Export: the trained model in the forms the recipe asks for, each loaded back and compared before it is committed.


MAIN = "export"
"""Where the main model lies in a run: the whole model where it is asked for, else the adapter."""


def export_run(run_uri: str) -> ExportedModel:
    """Exports the checkpoint that a run's result is taken from, each format once.

    Returns:
        Addresses and sizes of the main model and of every format, the main one first, and where it went on to.

    Raises:
        UserError: a format cannot hold the model, or a server refuses it.
        BatonError: what was written does not give what the trained model gives.
    """
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.recipe()
    tokens = run.read(TokenizedRows)
    chat.set_template_date(tokens.today if tokens else None)
    exportable.check(recipe)
    exportable.check_registry(recipe, servers.server_address(run, recipe))
    with scratch_folder("export") as scratch:
        source = ExportSource(run, recipe, scratch)
        main_format, *others = _order(recipe)
        main = _export(source, main_format, None)
        made = {main_format: main, **{name: _export(source, name, main) for name in others}}
        handed_on = _hand_on(source, recipe, main, made.get("mlflow"))
    exported = ExportedModel(
        model_uri=main.uri,
        bytes=main.manifest.bytes,
        files=len(main.manifest.files),
        exports=[
            ExportEntry(format=name, uri=export.uri, bytes=export.manifest.bytes, checked=export.meta.checked)
            for name, export in made.items()
        ],
    ).model_copy(update=handed_on)
    run.write(exported)
    run.record("export", {"seconds": time.time() - started})
    events.emit(events.Exported(uri=main.uri, bytes=main.manifest.bytes))
    return exported


def _order(recipe: Recipe) -> list[str]:
    """Returns the formats, the main one first: the whole model where it is asked for, else the adapter."""
    formats = list(recipe.export.formats)
    main = "safetensors" if "safetensors" in formats else "adapter"
    return [main, *(name for name in formats if name != main)]


def _export(source: ExportSource, export_format: str, main: Export | None) -> Export:
    """Returns the export in a format, made and checked unless it is there."""
    run = source.run
    settings = _settings(source, export_format, main)
    prefix = _prefix(run, f"exports/{export_format}" if main else MAIN, settings)
    manifest = _standing(run, prefix)
    if manifest is None:
        exportable.require_packages(export_format)
        target = f"{source.scratch}/{export_format}"
        os.makedirs(target)
        draft = Draft(source, target, main)
        FORMATS[export_format].write(draft)
        write_prompting(draft, export_format)
        finding = FORMATS[export_format].check(draft)
        write_card(draft, export_format, finding)
        meta = ModelMeta(
            run=run.name,
            format=export_format,
            digest=source.digest,
            step=source.checkpoint.step,
            settings=settings,
            checked=finding,
        )
        # After the check: what has a manifest was loaded and compared with the trained model.
        manifest, _ = bundle.publish(run.storage, prefix, target, kind="model", meta=meta.to_json())
        shutil.rmtree(target)
        events.emit(events.HandedOut(format=export_format, bytes=manifest.bytes, checked=finding.words))
    bundle.clear_others(run.storage, prefix, manifest)
    folder = f"{source.scratch}/fetched-{export_format}"
    return Export(
        uri=run.storage.uri(manifest.path(prefix)),
        manifest=manifest,
        meta=ModelMeta.read(manifest.meta, run.storage.uri(prefix)),
        # Fetched only where another format is made of it, or a server takes it.
        folder=functools.cache(lambda: bundle.fetch(run.storage, prefix, manifest, folder)),
    )


def _prefix(run: Run, name: str, settings: str) -> str:
    """Returns where an export lies: below its settings' digest too, where the name is taken by one with others."""
    committed = usable_manifest(run.storage, run.path(name))
    if committed is None or ModelMeta.read(committed.meta, run.uri).settings in (None, settings):
        return run.path(name)
    return run.path(f"{name}-{settings[:8]}")


def _standing(run: Run, prefix: str) -> Manifest | None:
    """Returns what is committed, every byte checked; None where nothing is or it is damaged, and is then marked."""
    manifest = usable_manifest(run.storage, prefix)
    if manifest is None:
        return None
    if problems := bundle.verify(run.storage, prefix, manifest):
        mark_damaged(run.storage, prefix, manifest)
        events.emit(events.SkippedExport(uri=run.storage.uri(prefix), reason="; ".join(problems)))
        return None
    return manifest


def _settings(source: ExportSource, export_format: str, main: Export | None) -> str:
    """Returns a digest of what decides an export's bytes."""
    spec = source.recipe.export.model_dump(mode="json")
    decisive: dict[str, object] = {name: spec[name] for name in ("licence", *FORMATS[export_format].settings)}
    decisive |= {"format": export_format, "state": source.digest}
    if export_format in MADE_OF_MAIN and main:
        decisive["main"] = main.manifest.folder
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _hand_on(source: ExportSource, recipe: Recipe, main: Export, mlflow: Export | None) -> dict[str, Document]:
    """Sends the model on to MLflow's server and the Hub, as the recipe asks, and returns where it is there."""
    handed_on: dict[str, Document] = {}
    if mlflow and (there := publish.log_to_mlflow(source.run, recipe, mlflow.manifest, mlflow.folder(), source.digest)):
        handed_on["registry"] = there
    if recipe.export.hub:
        handed_on["hub"] = publish.push_to_hub(source.run, recipe.export.hub, main.manifest, main.folder())
    return handed_on
