"""Stages of a retraining: decide whether to train, promote or keep the model, and end the turn.

models/<name>/outcomes/<owner>.json     outcome of each retraining, for the process that started it
models/<name>/rejected/<digest>.json    rejected by a gate: the same run would be rejected again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from baton import events
from baton.documents import Document
from baton.errors import BatonError
from baton.events import Retraining
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.retrain.content import data_digest, digest_of, recipe_digest
from baton.retrain.lock import LockHolder, RetrainLock
from baton.runs import lineage
from baton.runs.documents import SplitData
from baton.runs.outcomes import AcceptedModel, EvaluationResult, ExportedModel, GateVerdict, ModelMeta, RetrainNote
from baton.runs.run import Run, now
from baton.store import bundle
from baton.store.manifest import usable_manifest
from baton.store.storage import Storage


class Rejection(Document):
    """A run that a gate has rejected."""

    run: str
    at: str


def keep_outcome(storage: Storage, name: str, owner: str, outcome: Retraining) -> None:
    """Keeps what a retraining, by its recipe's name and its owner, came to, and emits it."""
    storage.write(_path(name, owner), json.dumps(outcome.fields(), indent=1).encode())
    events.emit(outcome)


def has_outcome(storage: Storage, name: str, owner: str) -> bool:
    """Tells whether it is known what a retraining came to."""
    return storage.exists(_path(name, owner))


def note_rejection(storage: Storage, name: str, verdict: str, run: str) -> None:
    """Remembers that a gate has rejected a run."""
    rejection = Rejection(run=run, at=now())
    storage.write(f"models/{name}/rejected/{verdict}.json", json.dumps(rejection.to_json()).encode())


def find_rejection(storage: Storage, name: str, verdict: str) -> Rejection | None:
    """Returns a rejection, None where there was none."""
    path = f"models/{name}/rejected/{verdict}.json"
    try:
        return Rejection.read(storage.read(path), storage.uri(path))
    except FileNotFoundError:
        return None


def _path(name: str, owner: str) -> str:
    return f"models/{name}/outcomes/{owner}.json"


@dataclass(frozen=True)
class RetrainDecision:
    """The decision, its reason and, where there is something to train, the run and its recipe.

    Attributes:
        decision: `train`, `unchanged` or `busy`.
        words: Why, for people.
        run: Name of the run; that of the same retraining broken off before, if there was one.
        recipe: The recipe to train, as JSON.
    """

    decision: str
    words: str
    run: str = ""
    recipe: str = ""


def check_for_changes(recipe: Recipe, owner: str) -> RetrainDecision:
    """Decides whether a model is trained again; where it is, nobody else retrains it until the turn is ended.

    What has not changed since the model in use was accepted, or what its gate rejected already, is not trained again.

    Raises:
        UserError: a source cannot be found or read.
    """
    storage = Storage(recipe.store.uri)
    result, _ = _examine(recipe, storage)
    turns = RetrainLock(storage, recipe.name, owner)
    if result.decision == "train":
        wait = recipe.retrain.concurrency == "queue"
        if turns.take(wait=wait, expires_s=recipe.retrain.expires_seconds, on_wait=_tell_waiting):
            result, note = _examine(recipe, storage)  # the one before may have done it
            if note:
                runs = [f"{result.run}-{phase.name}" for phase in recipe.phases] or [result.run]
                Run(storage, runs[-1]).write(note.model_copy(update={"owner": owner}))
                turns.note(runs)
            else:
                turns.end()
        else:
            result = RetrainDecision("busy", f"another retraining of {recipe.name} is under way")
    if result.decision != "train":
        keep_outcome(storage, recipe.name, owner, events.Retraining(result.decision, result.words, now()))
    events.emit(events.Looked(decision=result.decision, words=result.words, run=result.run))
    return result


def _examine(recipe: Recipe, storage: Storage) -> tuple[RetrainDecision, RetrainNote | None]:
    """Compares data and recipe with those of the model in use."""
    in_use = lineage.newest_accepted(storage, recipe.name)
    digests = {"data": data_digest(recipe, storage), "recipe": recipe_digest(recipe)}
    before = in_use.model
    changed = [name for name in digests if before is None or getattr(before, name) != digests[name]]
    if before and not changed:
        return RetrainDecision("unchanged", f"data and recipe are those of {before.run}, accepted {before.at}"), None
    continues = recipe.retrain.start == "accepted" and changed == ["data"]
    start = [in_use.number, recipe.retrain.replay] if continues else []
    parts = recipe.phase_recipes() or [recipe]
    # Named by what it is made of: one that broke off is found again without anybody remembering its name.
    run = f"{recipe.name}-{digest_of(digests, start, [part.num_chunks for part in parts])[:12]}"
    # With the model that it is judged against: what was rejected beside one may be accepted beside the next.
    verdict = digest_of(digests, start, in_use.number, parts[-1].evaluation.model_dump(mode="json"))
    if known := find_rejection(storage, recipe.name, verdict):
        return RetrainDecision("unchanged", f"data and recipe are those of {known.run}, rejected {known.at}"), None
    if continues:
        assert in_use.model is not None
        document = recipe.model_dump(mode="json")
        document["model"] |= {"base": in_use.model_uri, "revision": None, "from_scratch": None, "tokenizer": None}
        document["retrain"]["learnt"] = in_use.model.learnt
        recipe = load.validate(document, origin="the accepted model")
    learnt = recipe.retrain.learnt if continues else []
    note = RetrainNote(model=recipe.name, number=in_use.number, verdict=verdict, learnt=learnt, **digests)
    words = f"{' and '.join(changed)} changed since {before.run}" if before else "no model was accepted yet"
    words += f"; continues from model {in_use.number}" if continues else ""
    return RetrainDecision("train", words, run, load.dumps(recipe)), note


def _tell_waiting(holder: LockHolder) -> None:
    events.emit(events.Queued(behind=holder.owner, since=holder.at))


def promote_or_keep(run_uri: str) -> str:
    """Puts a run's model in the place of the one in use where the gate held, and leaves that where it did not.

    Returns:
        `promoted` or `rejected`.

    Raises:
        BatonError: the export is not what was committed, or another model was accepted meanwhile.
    """
    run = Run.open(run_uri)
    about, evaluation = run.need(RetrainNote), run.need(EvaluationResult)
    gate = evaluation.gate or GateVerdict(passed=True)
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
        note_rejection(run.storage, about.model, about.verdict, run.name)
        keep_outcome(run.storage, about.model, about.owner, came_to)
        return "rejected"
    model = _accepted(run, about, evaluation.summary)
    promoted = lineage.accept(run.storage, about.model, about.number, model)
    words = f"model {promoted.number} of {about.model}"
    came_to = replace(came_to, state="promoted", words=words, at=now(), model_uri=promoted.model_uri)
    keep_outcome(run.storage, about.model, about.owner, came_to)
    return "promoted"


def release_lock(model: str, store: str, owner: str, error: str | None) -> None:
    """Ends the turn of a retraining, however it went; where that is not known yet, it has failed."""
    storage = Storage(store)
    if not has_outcome(storage, model, owner):
        keep_outcome(storage, model, owner, Retraining("failed", error or "It ended without saying why.", now()))
    RetrainLock(storage, model, owner).end()


def _accepted(run: Run, about: RetrainNote, summary: str) -> AcceptedModel:
    """Returns what is kept of a model that is accepted, every byte of it read back."""
    exported = run.need(ExportedModel)
    folder = exported.model_uri.removeprefix(f"{run.storage.uri()}/")
    prefix, _, attempt = folder.rpartition("/")
    manifest = usable_manifest(run.storage, prefix)
    if manifest is None or manifest.folder != attempt:
        raise BatonError(f"{exported.model_uri} is not what is committed there.", remedy="Run the export again.")
    bundle.require_whole(run.storage, prefix, manifest, bundle.verify(run.storage, prefix, manifest))
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
