"""Whether everything that finished stages of a run had left is still in the store.

Kubeflow's cache knows a stage's inputs and not whether what the stage wrote still exists. So the baton, which is made
by the stage that never is cached, counts how often something was gone: it changes when something is.
"""

from __future__ import annotations

from baton.checkpoint.store import CheckpointStore
from baton.runs.documents import LearningRate, MissingArtifact, MissingArtifacts, PinnedModels, RunInfo, Tokens
from baton.runs.plan import Plan
from baton.runs.ref import RunRef
from baton.runs.run import Run, now
from baton.store import bundle
from baton.store.manifest import mark_damaged, usable_manifest

LEFT_BY = {"tokenize-": (PinnedModels.NAME, Tokens.NAME, Plan.NAME), "lr-find-": (LearningRate.NAME,)}
"""How a stage's records begin → the documents that it leaves with the run."""


def run_ref(run: Run) -> RunRef:
    """Returns a run's baton, the same again as long as nothing is lost that a finished stage of the run had left."""
    losses = (run.read(MissingArtifacts) or MissingArtifacts()).losses
    if lost := _lost(run):
        run.warn(f"{lost} is no longer in the store, so no stage is taken from Kubeflow's cache")
        losses = [*losses, MissingArtifact(at=now(), lost=lost)]
        # Counted for good: the baton stays another one when what was lost is made again, as stages that Kubeflow
        # remembers from before did not see that.
        run.write(MissingArtifacts(losses=losses))
    return RunRef(run.uri, run.need(RunInfo).created, len(losses))


def _lost(run: Run) -> str | None:
    """Returns what a stage of this run had left and is gone, or None."""
    records = run.storage.list(run.path("records"))
    for stage, names in LEFT_BY.items():
        if any(record.startswith(stage) for record in records):
            for name in names:
                if run.get(name) is None:
                    return name
    tokens = run.read(Tokens)
    return (_lost_bundle(run, tokens.prefix) if tokens else None) or _lost_checkpoint(run, records)


def _lost_bundle(run: Run, prefix: str) -> str | None:
    """Returns the prefix of a bundle that is not whole; one without its files is marked, so that it is made anew."""
    manifest = usable_manifest(run.storage, prefix)
    if manifest is None:
        return prefix
    if bundle.is_whole(run.storage, prefix, manifest):
        return None
    mark_damaged(run.storage, prefix, manifest)
    return prefix


def _lost_checkpoint(run: Run, records: list[str]) -> str | None:
    """Returns where the furthest checkpoint lay, if there is no whole one at its step or beyond."""
    store = CheckpointStore(run)
    attempts = run.attempts() if any(record.startswith("train-chunk-") for record in records) else []
    left = attempts[-1].to_step if attempts else 0
    reached = max(run.verified_step(), left)
    newest = next(store.whole(), None)
    return store.prefix(reached) if reached and (newest is None or newest.step < reached) else None
