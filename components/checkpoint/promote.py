"""Checkpoint stage: reads back what a chunk committed, marks newest and best, and writes its part of the proof."""

from __future__ import annotations

import time
from typing import Any

from components.shared import bundles, events
from components.shared.bundles import Manifest
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import DamagedError
from components.shared.proof import proof_part
from components.shared.runs import Run, now


def promote(run_uri: str, index: int) -> dict[str, Any]:
    """Verifies the checkpoint of a chunk's target, or the newest before it.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1.

    Returns:
        The chunk's part of the resume proof, see `components.shared.proof`.

    Raises:
        DamagedError: what is in the store is not what was committed.
    """
    started = time.time()
    run = Run.open(run_uri)
    store = CheckpointStore(run)
    target = run.plan().targets[index - 1]
    manifest = store.manifest(target)
    if manifest is None:
        raise DamagedError(f"{store.storage.uri(store.prefix(target))}: chunk {index} left no checkpoint there.")
    bundles.require_whole(run.storage, store.prefix(target), manifest, store.verify(target, manifest))
    part = {**proof_part(store, target, manifest), "chunk": index, "verified": True, "verified_at": now()}
    run.put(f"proof/chunk-{index:03d}.json", part)
    _mark(run, store, target, manifest)
    run.record(f"checkpoint-{index:03d}", {"seconds": time.time() - started, "chunk": index})
    events.emit("verified", step=target, bytes=manifest.bytes, digest=manifest.meta["digest"])
    return part


def as_markdown(part: dict[str, Any]) -> str:
    """Returns a chunk's part of the proof for the Kubeflow page."""
    checked = part["checked"] or {}
    rows = "\n".join(f"| {name} | {verdict} |" for name, verdict in checked.items())
    parent = f"step {part['parent_step']}, `{part['parent_digest']}`" if part["parent_digest"] else "the start model"
    return (
        f"# Resume proof, chunk {part['chunk']}: step {part['step']}\n\n"
        f"- own digest: `{part['digest']}`\n- continues: {parent}\n- chain: `{part['chain']}`\n"
        f"- level: **{part['level']}**\n- read back and verified: {part['bytes']:,} bytes\n- at: `{part['uri']}`\n\n"
        + (f"| restored in this chunk | compared before the first step |\n|---|---|\n{rows}\n" if rows else "")
    )


def _mark(run: Run, store: CheckpointStore, step: int, manifest: Manifest) -> None:
    """Writes which checkpoint is newest and which has the lowest evaluation loss so far."""
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in store.history(step, manifest)
        if entry.get("eval_loss") is not None
    }
    committed = {at: found for at, found in store.committed() if isinstance(found, Manifest)}
    best = min((at for at in committed if at in losses), key=losses.__getitem__, default=None)
    document: dict[str, Any] = {"newest": {"step": step, "uri": store.uri(step, manifest)}}
    if best is not None:
        document["best"] = {"step": best, "uri": store.uri(best, committed[best]), "eval_loss": losses[best]}
    run.put("promoted.json", document)
