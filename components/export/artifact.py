"""What export leaves in Kubeflow: the model card, or the model itself, with the address of each format."""

from __future__ import annotations

from baton.components.export.card import LIBRARIES
from baton.components.shared.pages.cards import Artifact, Card
from baton.components.shared.runs.documents.outcome import ExportedModel, ModelMeta
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles


def leave(run: Run, exported: ExportedModel, artifact: Artifact) -> None:
    """Writes the artifact of a model that is exported.

    Args:
        run: The run.
        exported: What `export_run` returned.
        artifact: As kfp gives it to the stage.

    Raises:
        BatonError: the disk has no room for the files, or they are no longer what was committed.
    """
    prefix = exported.model_uri.removeprefix(f"{run.storage.uri()}/").rpartition("/")[0]
    manifest = bundles.read_manifest(run.storage, prefix)
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
        bundles.fetch(run.storage, prefix, manifest, artifact.path, in_place=False)
        Card("", facts).tell(artifact)
    else:
        Card(run.storage.read(manifest.path(prefix, "README.md")).decode(), facts).leave(artifact)
