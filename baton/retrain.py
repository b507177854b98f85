"""Stages of a retraining: decide whether to train, promote or keep the model, and release the lock.

models/<name>/seen.json                 signature and SHA-256 of each file of the sources
models/<name>/outcomes/<owner>.json     `Retraining` of each retraining, for the process that started it
models/<name>/rejected/<digest>.json    a gate's rejection, which the same inputs would meet again
models/<name>/turns/000007/turn.json    holder of the lock: put-if-absent, so one of several takers gets it
models/<name>/turns/000007/runs.json    the runs that it trains
models/<name>/turns/000007/ended.json   its end
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from baton import documents, events
from baton.checkpoint import seals
from baton.errors import BatonError, DamagedError, UserError
from baton.models import user_code
from baton.recipe import load
from baton.recipe.data import DataSource
from baton.recipe.recipe import Recipe
from baton.runs import lineage, objects
from baton.runs.bill import bill
from baton.runs.documents import SplitData
from baton.runs.outcomes import AcceptedModel, EvaluationResult, ExportedModel, GateVerdict, ModelMeta, RetrainNote
from baton.runs.run import Run, identity, now
from baton.runtime import SYSTEM, backoff
from baton.store import bundle, sources
from baton.store.manifest import usable_manifest
from baton.store.storage import Storage

Seen = dict[str, list[str]]  # address of a file → its `_signature`, and the SHA-256 of its content
TAGS = ("ETag", "etag", "e_tag", "blob_id")  # file systems' names for a tag of an object's content


class Rejection(documents.Document):
    run: str
    at: str


@dataclass(frozen=True)
class RetrainDecision:
    decision: str  # `train`, `unchanged` or `busy`
    words: str  # reason, for people
    run: str = ""
    recipe: str = ""  # as JSON


def check_for_changes(recipe: Recipe, owner: str) -> RetrainDecision:
    """Decides whether a model is trained again; if so, no other retraining begins until the lock is released.

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
                lineage.note_retraining(Run(storage, runs[-1]), note.model_copy(update={"owner": owner}))
                lock.note_runs(runs)
            else:
                lock.release()
        else:
            result = RetrainDecision("busy", f"another retraining of {recipe.name} is under way")
    if result.decision != "train":
        keep_outcome(storage, recipe.name, owner, events.Retraining(result.decision, result.words, now()))
    events.emit(events.Looked(decision=result.decision, words=result.words, run=result.run))
    return result


@seals.sealed(objects.PROMOTE, appends=False)
def promote_or_keep(run_uri: str) -> str:
    """Accepts a run's exported model where the gate held; returns `promoted` or `rejected`.

    A damaged export, or another model accepted meanwhile, is a BatonError.
    """
    run = Run.open(run_uri)
    storage, note, evaluation = run.storage, lineage.retraining(run), run.need(EvaluationResult)
    gate = evaluation.gate or GateVerdict(passed=True)
    outcome = events.Retraining(
        "rejected",
        "; ".join(gate.failed),
        now(),
        run=run.name,
        run_uri=run.uri,
        report_uri=storage.uri(run.path("report.html")),
        summary=evaluation.summary,
        gate=[{"words": line.words, "held": line.held} for line in gate.lines],
        bill=paid.words if (paid := bill(run)) else None,
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
        keep_outcome(storage, model, owner, events.Retraining("failed", error or "It ended without saying why.", now()))
    RetrainLock(storage, model, owner).release()


def keep_outcome(storage: Storage, name: str, owner: str, outcome: events.Retraining) -> None:
    """Keeps a retraining's outcome, by its recipe's name and its owner, and emits it."""
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
        reason = f"data and recipe are unchanged since {before.run}, accepted {before.at}"
        return RetrainDecision("unchanged", reason), None
    continues = recipe.retrain.start == "accepted" and changed == ["data"]
    start = [in_use.number, recipe.retrain.replay] if continues else []
    parts = recipe.phase_recipes() or [recipe]
    # Named by its inputs: a retraining that broke off finds its run again.
    run = f"{recipe.name}-{_sha256([digests, start, [part.num_chunks for part in parts]])[:12]}"
    # With its rival's number: a model rejected against one may be accepted against the next.
    verdict = _sha256([digests, start, in_use.number, parts[-1].evaluation.model_dump(mode="json")])
    path = _rejection_path(recipe.name, verdict)
    if storage.exists(path):
        known = Rejection.read(storage.read(path), storage.uri(path))
        reason = f"data and recipe are unchanged since {known.run}, rejected {known.at}"
        return RetrainDecision("unchanged", reason), None
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
        raise BatonError(f"{exported.model_uri} differs from the commit there.", remedy="Run the export again.")
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


def _signature(file: sources.SourceFile) -> str:
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
        seen = documents.load_object(storage.read(path), storage.uri(path))
    except (FileNotFoundError, DamagedError):
        return {}
    return {uri: known for uri, known in seen.items() if isinstance(known, list) and len(known) == 2}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Environment variable: the process with which the turn ends, as `this_process` writes it.
PROCESS = "BATON_RETRAIN_PROCESS"
_CLOCK = "clock-"
_TURNS = 20  # newest ones among which a retraining that has ended looks for its own
_LONGEST_PAUSE = 30.0


class LockHolder(documents.Document):
    owner: str
    at: str
    process: str | None = None  # as in `PROCESS`


class RetrainLock:
    """Lock of a model in the store, held for a turn by one retraining at a time.

    A turn also ends when its process is known to be dead, or when neither it nor its runs were written to for
    `expires_s`; a chunk that trains notes its step every ten seconds. All times, the present too, are those that the
    store gives to objects, so that clocks need not agree. `owner` is a retraining's name, which its restarted stages
    have too.
    """

    # A holder that was only asleep may wake after its turn. It does no harm: checkpoints are bundles, and `accepted`
    # takes one of two models with the same rival.

    def __init__(self, storage: Storage, name: str, owner: str) -> None:
        self._storage, self._owner = storage, owner
        self._folder = f"models/{name}/turns"

    def acquire(
        self, *, wait: bool, expires_s: float, on_wait: Callable[[LockHolder], None] = lambda holder: None
    ) -> bool:
        """Acquires the lock, and tells whether it is ours now; `on_wait` is called once for each other holder."""
        told = 0
        for _ in backoff(math.inf, pause=0.5, growth=2, longest=_LONGEST_PAUSE):
            number, holder = self._claimed(expires_s)
            if holder.owner == self._owner:
                return True
            if not wait:
                break
            if told != number:
                on_wait(holder)
                told = number
        return False

    def note_runs(self, runs: list[str]) -> None:
        if number := self._ours():
            self._storage.write(f"{self._path(number)}/runs.json", json.dumps(runs).encode())

    def runs(self) -> list[str]:
        """Returns the runs that the owner's newest turn trains, also after its end; none where they are not noted."""
        newest = self._newest()
        for number in range(newest, max(newest - _TURNS, 0), -1):
            holder = self._holder(number)
            if holder and holder.owner == self._owner:
                return self._runs(number)
        return []

    def release(self) -> None:
        if number := self._ours():
            self._storage.create(f"{self._path(number)}/ended.json", json.dumps({"at": now()}).encode())

    def _ours(self) -> int | None:
        number = self._newest()
        holder = self._holder(number)
        return number if holder and holder.owner == self._owner and not self._is_over(number) else None

    def _newest(self) -> int:
        return max((int(name) for name in self._storage.list(self._folder) if name.isdecimal()), default=0)

    def _claimed(self, expires_s: float) -> tuple[int, LockHolder]:
        """Returns the current turn and its holder, after beginning one where there was none."""
        while True:
            number = self._newest()
            holder = self._holder(number)
            if holder is None:  # the first, or one that is being written
                self._begin(max(number, 1))
                continue  # whose it is, is read back
            is_over = self._is_over(number)
            # A restarted stage of this retraining still has its turn.
            if holder.owner == self._owner and not is_over:
                return number, holder
            if not is_over and not self._is_gone(number, holder, expires_s):
                return number, holder
            # Others may see the same end and create it too: the loop reads back whose it is.
            self._begin(number + 1)

    def _runs(self, number: int) -> list[str]:
        # Runs that are not noted yet, or damaged, are no sign of life.
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return [str(run) for run in documents.load(self._storage.read(f"{self._path(number)}/runs.json"))]
        return []

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:06d}"

    def _begin(self, number: int) -> None:
        holder = LockHolder(owner=self._owner, at=now(), process=os.environ.get(PROCESS))
        self._storage.create(f"{self._path(number)}/turn.json", json.dumps(holder.to_json()).encode())

    def _holder(self, number: int) -> LockHolder | None:
        path = f"{self._path(number)}/turn.json"
        with contextlib.suppress(FileNotFoundError):
            return LockHolder.read(self._storage.read(path), self._storage.uri(path))
        return None

    def _is_over(self, number: int) -> bool:
        return self._storage.exists(f"{self._path(number)}/ended.json")

    def _is_gone(self, number: int, holder: LockHolder, expires_s: float) -> bool:
        if _has_died(holder.process):
            return True
        clock = f"{self._path(number)}/{_CLOCK}{uuid.uuid4().hex}"
        self._storage.write(clock, b"")
        try:
            written = self._storage.find(self._path(number))
            present = written[clock.rpartition("/")[2]][1]
            signs = [at for name, (_, at) in written.items() if not name.startswith(_CLOCK)]
            for run in self._runs(number):
                signs += [at for _, at in self._storage.find(f"runs/{run}").values()]
        except FileNotFoundError:  # a file was renamed during the listing, so somebody lives
            return False
        finally:
            self._storage.remove(clock)
        # `signs` has the turn itself at least, which `_claimed` has read.
        return (present - max(signs)).total_seconds() > expires_s


def this_process() -> str:
    """Returns an identity of this process that no later process of the same number has."""
    return json.dumps({"machine": _machine(), "pid": os.getpid(), "began": psutil.Process().create_time()})


def _has_died(process: str | None) -> bool:
    try:
        known = json.loads(process) if process else None
        if known is None or known["machine"] != _machine():
            return False
        process_now = psutil.Process(known["pid"])
        is_another = abs(process_now.create_time() - known["began"]) > 1
        return bool(is_another or process_now.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (ValueError, TypeError, KeyError):  # not as `this_process` writes it: times decide
        return False


def _machine() -> str:
    """Returns an identity of the machine or container in which process numbers count."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
        # Machines may share a host name, and all have the same name for their first set of numbers.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {numbers}"
