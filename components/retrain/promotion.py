"""The last stages of a retraining: the new model takes its place or not, and the turn is ended."""

from __future__ import annotations

from dataclasses import replace

from baton.components.retrain import outcome
from baton.components.shared.core.errors import BatonError
from baton.components.shared.core.events import Retraining
from baton.components.shared.runs import accepted
from baton.components.shared.runs.documents.data import SplitData
from baton.components.shared.runs.documents.outcome import (
    AcceptedModel,
    Evaluation,
    ExportedModel,
    ModelMeta,
    RetrainNote,
    Verdict,
)
from baton.components.shared.runs.run import Run, now
from baton.components.shared.runs.turns import Turns
from baton.components.shared.store import bundles
from baton.components.shared.store.storage import Storage


def promote_or_keep(run_uri: str) -> str:
    """Puts a run's model in the place of the one in use where the gate held, and leaves that where it did not.

    Args:
        run_uri: The run, judged and exported.

    Returns:
        `promoted` or `rejected`.

    Raises:
        BatonError: the export is not what was committed, or another model was accepted meanwhile.
    """
    run = Run.open(run_uri)
    about, evaluation = run.need(RetrainNote), run.need(Evaluation)
    gate = evaluation.gate or Verdict(passed=True)
    came_to = Retraining(
        "rejected",
        "; ".join(gate.failed),
        now(),
        run=run.name,
        run_uri=run.uri,
        report_uri=run.storage.uri(run.path("report.html")),
        summary=evaluation.summary,
        gate=[{"words": line.words, "held": line.held} for line in gate.lines],
    )
    if not gate.passed:
        outcome.reject(run.storage, about.model, about.verdict, run.name)
        outcome.keep(run.storage, about.model, about.owner, came_to)
        return "rejected"
    model = _accepted(run, about, evaluation.summary)
    promoted = accepted.add(run.storage, about.model, about.number, model)
    words = f"model {promoted.number} of {about.model}"
    came_to = replace(came_to, state="promoted", words=words, at=now(), model_uri=promoted.model_uri)
    outcome.keep(run.storage, about.model, about.owner, came_to)
    return "promoted"


def release(model: str, store: str, owner: str, error: str | None) -> None:
    """Ends the turn of a retraining, however it went; where that is not known yet, it has failed."""
    storage = Storage(store)
    if not outcome.is_kept(storage, model, owner):
        outcome.keep(storage, model, owner, Retraining("failed", error or "It ended without saying why.", now()))
    Turns(storage, model, owner).end()


def _accepted(run: Run, about: RetrainNote, summary: str) -> AcceptedModel:
    """Returns what is kept of a model that is accepted, every byte of it read back."""
    exported = run.need(ExportedModel)
    folder = exported.model_uri.removeprefix(f"{run.storage.uri()}/")
    prefix, _, attempt = folder.rpartition("/")
    manifest = bundles.usable_manifest(run.storage, prefix)
    if manifest is None or manifest.folder != attempt:
        raise BatonError(f"{exported.model_uri} is not what is committed there.", remedy="Run the export again.")
    bundles.require_whole(run.storage, prefix, manifest, bundles.verify(run.storage, prefix, manifest))
    return AcceptedModel(
        run=run.name,
        run_uri=run.uri,
        summary=summary,
        model_uri=exported.model_uri,
        digest=ModelMeta.read(manifest.meta, run.storage.uri(prefix)).digest,
        data=about.data,
        recipe=about.recipe,
        learnt=[*about.learnt, run.need(SplitData).digest],
        registry=exported.registry.to_json() if exported.registry else None,
        at=now(),
    )
