"""Whether everything that finished stages of a run had left is still in the store.

Kubeflow's cache knows a stage's inputs and not whether what the stage wrote still exists. So the stages that may be
cached take one more input, which is made here by the stage that never is: it changes when something is gone.
"""

from __future__ import annotations

import logging

from components.shared.checkpoint_store import CheckpointStore
from components.shared.runs import Run, now
from components.shared.store import bundles
from components.shared.store.bundles import Manifest

logger = logging.getLogger("baton")

LEFT_BY = {"tokenize-": ("model.json", "tokens.json", "plan.json"), "lr-find-": ("lr_find.json",)}
"""How a stage's records begin → the documents that it leaves with the run."""


def standing(run: Run) -> str:
    """Returns a text that is the same again as long as nothing is lost that a finished stage of the run had left."""
    losses: list[dict[str, str]] = (run.get("losses.json") or {"losses": []})["losses"]
    if lost := _lost(run):
        logger.warning("%s is no longer in the store, so no stage is taken from Kubeflow's cache", lost)
        losses = [*losses, {"at": now(), "lost": lost}]
        run.put("losses.json", {"losses": losses})
    return f"{run.require('recipe.json')['created']} {len(losses)}"


def _lost(run: Run) -> str | None:
    """Returns what a stage of this run had left and is gone, or None."""
    records = run.storage.list(run.path("records"))
    for stage, names in LEFT_BY.items():
        if any(record.startswith(stage) for record in records):
            for name in names:
                if run.get(name) is None:
                    return name
    tokens = run.get("tokens.json")
    return (_lost_bundle(run, tokens["prefix"]) if tokens else None) or _lost_checkpoint(run, records)


def _lost_bundle(run: Run, prefix: str) -> str | None:
    """Returns the prefix of a bundle that is not whole; one without its files is marked, so that it is made anew."""
    manifest = bundles.usable_manifest(run.storage, prefix)
    if manifest is None:
        return prefix
    present = run.storage.find(manifest.path(prefix))
    if all(name in present and present[name][0] == entry["size"] for name, entry in manifest.files.items()):
        return None
    bundles.mark_damaged(run.storage, prefix, manifest)
    return prefix


def _lost_checkpoint(run: Run, records: list[str]) -> str | None:
    """Returns where the furthest checkpoint lay, if there is no whole one at its step or beyond."""
    store = CheckpointStore(run)
    chunks = sorted(record for record in records if record.startswith("train-chunk-"))
    left = run.require(f"records/{chunks[-1]}")["to_step"] if chunks else 0
    reached = max(store.verified_step(), left)
    for step, manifest in store.committed():
        if step < reached:
            break
        if isinstance(manifest, Manifest) and store.is_whole(step, manifest):
            return None
    return store.prefix(reached) if reached else None
