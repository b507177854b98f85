"""Stages of a retraining: decide whether to train, promote or keep the model, and release the lock.

models/<name>/seen.json                 signature and SHA-256 of each file of the sources
models/<name>/outcomes/<owner>.json     `Retraining` of each retraining, for the process that started it
models/<name>/rejected/<digest>.json    a gate's rejection, which the same inputs would meet again
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, replace
from typing import Any

from baton import events
from baton.documents import Document, load_object
from baton.errors import BatonError, DamagedError, UserError
from baton.events import Retraining
from baton.models import user_code
from baton.recipe import load
from baton.recipe.data import DataSource
from baton.recipe.recipe import Recipe
from baton.retrain.lock import RetrainLock
from baton.runs import lineage
from baton.runs.documents import SplitData
from baton.runs.outcomes import AcceptedModel, EvaluationResult, ExportedModel, GateVerdict, ModelMeta, RetrainNote
from baton.runs.run import Run, identity, now
from baton.runtime import SYSTEM
from baton.store import bundle, sources
from baton.store.manifest import usable_manifest
from baton.store.sources import SourceFile
from baton.store.storage import Storage

Seen = dict[str, list[str]]
"""Address of a file → its `_signature`, and the SHA-256 of its content."""
TAGS = ("ETag", "etag", "e_tag", "blob_id")
"""File systems' names for a tag of an object's content."""


class Rejection(Document):
    run: str
    at: str


@dataclass(frozen=True)
class RetrainDecision:
    decision: str
    """`train`, `unchanged` or `busy`."""
    words: str
    """Reason, for people."""
    run: str = ""
    recipe: str = ""
    """As JSON."""


def check_for_changes(recipe: Recipe, owner: str) -> RetrainDecision:
    """Decides whether a model is trained again; if so, nobody else retrains it until the lock is released.

    Data and recipe must have changed since the model in use was accepted, and not be rejected already. `owner` is the
    retraining's name, which a second attempt at this stage has too.
    """
    storage = Storage(recipe.store.uri)
    result, _ = _examine(recipe, storage)
    lock = RetrainLock(storage, recipe.name, owner)
    if result.decision == "train":
        if lock.acquire(
            wait=recipe.retrain.concurrency == "queue",
            expires_s=recipe.retrain.expires_seconds,
            on_wait=lambda holder: events.emit(events.Queued(behind=holder.owner, since=holder.at)),
        ):
            result, note = _examine(recipe, storage)  # again: the last holder may have done it
            if note:
                runs = [f"{result.run}-{phase.name}" for phase in recipe.phases] or [result.run]
                Run(storage, runs[-1]).write(note.model_copy(update={"owner": owner}))
                lock.note_runs(runs)
            else:
                lock.release()
        else:
            result = RetrainDecision("busy", f"another retraining of {recipe.name} is under way")
    if result.decision != "train":
        keep_outcome(storage, recipe.name, owner, Retraining(result.decision, result.words, now()))
    events.emit(events.Looked(decision=result.decision, words=result.words, run=result.run))
    return result


def promote_or_keep(run_uri: str) -> str:
    """Accepts a run's exported model where the gate held; returns `promoted` or `rejected`.

    A damaged export, or another model accepted meanwhile, is a BatonError.
    """
    run = Run.open(run_uri)
    storage, note, evaluation = run.storage, run.need(RetrainNote), run.need(EvaluationResult)
    gate = evaluation.gate or GateVerdict(passed=True)
    outcome = Retraining(
        "rejected",
        "; ".join(gate.failed),
        now(),
        run=run.name,
        run_uri=run.uri,
        report_uri=storage.uri(run.path("report.html")),
        summary=evaluation.summary,
        gate=[{"words": line.words, "held": line.held} for line in gate.lines],
    )
    if gate.passed:
        promoted = lineage.accept(storage, note.model, note.number, _accepted(run, note, evaluation.summary))
        words = f"model {promoted.number} of {note.model}"
        outcome = replace(outcome, state="promoted", words=words, at=now(), model_uri=promoted.model_uri)
    else:
        rejection = Rejection(run=run.name, at=now())
        storage.write(_rejection_path(note.model, note.verdict), json.dumps(rejection.to_json()).encode())
    keep_outcome(storage, note.model, note.owner, outcome)
    return outcome.state


def release_lock(model: str, store: str, owner: str, error: str | None) -> None:
    """Ends a retraining, however it went; where that is not known yet, it has failed."""
    storage = Storage(store)
    if not storage.exists(_outcome_path(model, owner)):
        keep_outcome(storage, model, owner, Retraining("failed", error or "It ended without saying why.", now()))
    RetrainLock(storage, model, owner).release()


def keep_outcome(storage: Storage, name: str, owner: str, outcome: Retraining) -> None:
    """Keeps what a retraining, by its recipe's name and its owner, came to, and emits it."""
    storage.write(_outcome_path(name, owner), json.dumps(outcome.fields(), indent=1).encode())
    events.emit(outcome)


def data_digest(recipe: Recipe, storage: Storage) -> str:
    """Returns a digest of the content and settings of all sources, those of phases too; addresses do not count."""
    # A file is read again only if its signature differs from the one kept in the store.
    path = f"models/{recipe.name}/seen.json"
    before = _read_seen(storage, path)
    now: Seen = {}
    contents = []
    for part in recipe.phase_recipes() or [recipe]:
        for source in part.data.sources:
            settings = source.model_dump(mode="json", exclude={"uri"})
            contents.append([settings, *sorted(_contents(source, before, now))])
    if now != before:
        storage.write(path, json.dumps(now).encode())
    return _sha256(contents)


def recipe_digest(recipe: Recipe) -> str:
    """Returns a digest of all settings that decide the model's bits, without chunks and the section `retrain`."""
    documents = []
    for part in recipe.phase_recipes() or [recipe]:
        document = identity(part)
        del document["chunks"], document["retrain"]
        documents.append([document, user_code.digest(part.hooks.source) if part.hooks.source else None])
    return _sha256(documents)


def _examine(recipe: Recipe, storage: Storage) -> tuple[RetrainDecision, RetrainNote | None]:
    """Compares data and recipe with those of the model in use; the note is for the run to be trained."""
    in_use = lineage.newest_accepted(storage, recipe.name)
    digests = {"data": data_digest(recipe, storage), "recipe": recipe_digest(recipe)}
    before = in_use.model
    changed = [name for name in digests if before is None or getattr(before, name) != digests[name]]
    if before and not changed:
        return RetrainDecision("unchanged", f"data and recipe are those of {before.run}, accepted {before.at}"), None
    continues = recipe.retrain.start == "accepted" and changed == ["data"]
    start = [in_use.number, recipe.retrain.replay] if continues else []
    parts = recipe.phase_recipes() or [recipe]
    # Named by its inputs: a retraining that broke off finds its run again.
    run = f"{recipe.name}-{_sha256([digests, start, [part.num_chunks for part in parts]])[:12]}"
    # With its rival's number: a model rejected beside one may be accepted beside the next.
    verdict = _sha256([digests, start, in_use.number, parts[-1].evaluation.model_dump(mode="json")])
    path = _rejection_path(recipe.name, verdict)
    if storage.exists(path):
        known = Rejection.read(storage.read(path), storage.uri(path))
        return RetrainDecision("unchanged", f"data and recipe are those of {known.run}, rejected {known.at}"), None
    learnt: list[str] = []
    if continues:
        assert in_use.model is not None
        learnt = in_use.model.learnt
        document = recipe.model_dump(mode="json")
        document["model"] |= {"base": in_use.model_uri, "revision": None, "from_scratch": None, "tokenizer": None}
        document["retrain"]["learnt"] = learnt
        recipe = load.validate(document, origin="the accepted model")
    note = RetrainNote(model=recipe.name, number=in_use.number, verdict=verdict, learnt=learnt, **digests)
    words = f"{' and '.join(changed)} changed since {before.run}" if before else "no model was accepted yet"
    words += f"; continues from model {in_use.number}" if continues else ""
    return RetrainDecision("train", words, run, load.dumps(recipe)), note


def _accepted(run: Run, note: RetrainNote, summary: str) -> AcceptedModel:
    """Returns the note of an accepted model, every byte of it read back."""
    exported = run.need(ExportedModel)
    prefix, _, attempt = exported.model_uri.removeprefix(f"{run.storage.uri()}/").rpartition("/")
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
        data=note.data,
        recipe=note.recipe,
        learnt=[*note.learnt, run.need(SplitData).digest],
        registry=exported.registry.to_json() if exported.registry else None,
        at=now(),
    )


def _outcome_path(name: str, owner: str) -> str:
    return f"models/{name}/outcomes/{owner}.json"


def _rejection_path(name: str, verdict: str) -> str:
    return f"models/{name}/rejected/{verdict}.json"


def _contents(source: DataSource, before: Seen, now: Seen) -> list[str]:
    """Returns a digest for each file of a source, and notes them in `now`."""
    if source.uri == sources.BUILTIN:
        return [f"Python {platform.python_version()}"]
    if sources.is_dataset_id(source.uri):
        return [f"{source.uri.partition('?')[2]} {_revision(source.uri)}"]

    def look(uri: str) -> list[str]:
        signature = _signature(files[uri])
        known = before.get(uri)
        if known and known[0] == signature:
            return known
        return [signature, files[uri].storage.sha256(files[uri].path)[1]]

    files = {file.uri: file for file in sources.files([source.uri])}
    digests = dict(zip(sorted(files), SYSTEM.each(look, sorted(files)), strict=True))
    now |= digests
    return [digest for _, digest in digests.values()]


def _signature(file: SourceFile) -> str:
    info = file.info()
    tag = next((info[name] for name in TAGS if info.get(name)), None)
    told = [tag] if tag else [info.get(name) for name in ("mtime", "created", "ino")]
    return json.dumps([str(part) for part in (info.get("size"), *told)])


def _revision(source: str) -> str:
    from huggingface_hub import HfApi

    name, _, revision = source.removeprefix("hf://datasets/").partition("?")[0].rstrip("/").partition("@")
    try:
        return str(HfApi().dataset_info(name, revision=revision or None).sha)
    except Exception as error:
        raise UserError(
            f"data.source {source!r} cannot be looked up on the hub: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}",
            remedy="Check the name, HF_TOKEN for a private one, and that the hub can be reached.",
        ) from None


def _read_seen(storage: Storage, path: str) -> Seen:
    """Returns the files seen before; where they cannot be read, none, and all files are hashed again."""
    try:
        seen = load_object(storage.read(path), storage.uri(path))
    except (FileNotFoundError, DamagedError):
        return {}
    return {uri: known for uri, known in seen.items() if isinstance(known, list) and len(known) == 2}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
