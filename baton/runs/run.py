"""A run in the store: its documents, records, checkpoints and failure; and a sweep: trials, verdicts and requests.

runs/<run>/{recipe,data,plan,…}.json      documents; JSON, one each
runs/<run>/{records,restarts,lost-pods,warnings,skips}/…json   an object for each of them
heals/<Kubeflow's run>/…json              starts after lost pods: put-if-absent, so one of several healers starts it
runs/<run>/{checkpoints/step-…,export,exports/<format>}/   bundles
data/<digest>/{split,tokens,…}            bundles shared between runs.
sweeps/<name>/sweep.json           recipe, metric, rungs, and the first bracket's trials
sweeps/<name>/trials/<id>.json     later trials: of a later bracket, or forked
sweeps/<name>/rungs/rung-001.json  scores, kept trials, stopped trials with the reason
sweeps/<name>/control/<id>.json    newest request: `stop` or `go`
sweeps/<name>/joins/rung-001-<id>.json  device that a trial has joined within a rung
sweeps/<name>/page.html            leaderboard and curves
runs/<run>/trial.json              makes a run a trial: the sweep, its id, its own values
runs/<run>/scores/chunk-001.json   score after each chunk
runs/<run>/failure.json            error of a chunk
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from baton import events, signing
from baton.documents import Document, Json, NamedDocument, load_object
from baton.errors import BatonError, DamagedError, OtherRunError, StoreError, UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import documents, objects
from baton.runs.objects import Mend
from baton.runs.outcomes import RunFailure, RungVerdict, SweepHead, TrialEntry, TrialRequest, TrialScore, TrialState
from baton.runs.plan import Plan
from baton.runs.versions import RUN_FORMATS, FormatVersions
from baton.store.storage import PATIENCE, Storage

logger = logging.getLogger("baton")
D = TypeVar("D", bound=Document)
N = TypeVar("N", bound=NamedDocument)
T = TypeVar("T")

FAILURE_TIMEOUT_S = 60.0  # limit for writing a run's failure and page, which take about four
FAILURE_STORE_S = 10  # patience with the store meanwhile
_TAKEN_BACK = b"null"  # content of a document in place of its removal, where that is denied


class DocumentFolder:
    """Documents of one run or sweep, addressed by the store and its name."""

    KIND: ClassVar[str]  # `run` or `sweep`; its plural is the folder of them all

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name

    @classmethod
    def open(cls, uri: str) -> Self:
        """Opens one by its address, such as `<store>/runs/<name>`."""
        store, separator, rest = uri.rstrip("/").rpartition(f"/{cls.KIND}s/")
        name, below, _ = rest.partition("/")
        if not separator or below or name in ("", ".", ".."):
            hint = f"Give the {cls.KIND} that it is part of: {store}{separator}{name}" if separator and below else None
            raise UserError(f"{cls.KIND} URI {uri!r} is not of the form STORE/{cls.KIND}s/NAME.", remedy=hint)
        return cls(Storage(store), name)

    def path(self, name: str = "") -> str:
        return f"{self.KIND}s/{self.name}/{name}".rstrip("/")

    @property
    def uri(self) -> str:
        return self.storage.uri(self.path())

    def read(self, kind: type[N], *key: int | str) -> N | None:
        """Returns a document by its type and key; None, or a FormatError or DamagedError of `Document.read`."""
        path = self.path(kind.file_name(*key))
        try:
            data = self.storage.read(path)
        except FileNotFoundError:
            return None
        return None if data == _TAKEN_BACK else self._parsed(kind.read, data, path)

    def need(self, kind: type[N], *key: int | str) -> N:
        """Returns a document as `read` does; a missing one is a UserError."""
        document = self.read(kind, *key)
        if document is None:
            raise self._missing(kind.file_name(*key))
        return document

    def read_all(self, kind: type[D], folder: str, prefix: str = "") -> list[D]:
        """Returns a folder's documents whose names begin with `prefix`, by name."""
        # Leases may be next to them, see `create_leased`.
        names = [name for name in self.storage.list(self.path(folder)) if name.startswith(prefix)]
        paths = [self.path(f"{folder}/{name}") for name in names if name.endswith(".json")]

        def read(path: str) -> D | None:
            with contextlib.suppress(FileNotFoundError):  # gone since, or no part of the run
                return self._parsed(kind.read, self.storage.read(path), path)
            return None

        return [document for document in self.storage.runtime.each(read, paths) if document is not None]

    def note_lost_pod(self, loss: documents.PodLoss) -> None:
        self.write(loss, _unique())

    def lost_pods(self) -> list[documents.PodLoss]:
        """Returns the lost pods after which Kubeflow's run was started again, by time."""
        return self.read_all(documents.PodLoss, "lost-pods")

    def raw(self, name: str) -> dict[str, Any] | None:
        """Returns a document as its Baton wrote it, to be hashed or copied; None where there is none."""
        path = self.path(name)
        try:
            return self._parsed(load_object, self.storage.read(path), path)
        except FileNotFoundError:
            return None

    def require(self, name: str) -> dict[str, Any]:
        """Returns a document as `raw` does; a missing one is a UserError."""
        document = self.raw(name)
        if document is None:
            raise self._missing(name)
        return document

    def _parsed(self, parse: Callable[[bytes, str], T], data: bytes, path: str) -> T | None:
        """Parses a document; a damaged one is absent where its stage writes it again, or nothing depends on it."""
        try:
            return parse(data, self.storage.uri(path))
        except DamagedError as error:
            known = objects.find(path.removeprefix(f"{self.path()}/")) if self.KIND == "run" else None
            if known and known.mend in (Mend.STAGE, Mend.NOTE) and known.pattern not in objects.HEADS:
                logger.warning("%s It is passed over.", error)
                return None
            again = " or remove it: the next start writes it again, and continues if that is the same content."
            is_own = known is not None and known.writers[:1] not in ((), (objects.FORK,), (objects.ENTER,))
            copy = f"Put it back from a copy of the store,{again if is_own else ' or choose another name.'}"
            raise DamagedError(error.message, remedy=error.remedy or copy) from None

    def write(self, document: NamedDocument, *key: int | str) -> None:
        self.put(document.file_name(*key), self._written(document, key))

    def write_new(self, document: NamedDocument, *key: int | str) -> bool:
        """Writes a document where there is none, and tells whether this call did."""
        return self.storage.create(self.path(document.file_name(*key)), as_json(self._written(document, key)))

    def _written(self, document: NamedDocument, key: tuple[int | str, ...]) -> Mapping[str, Any]:
        return document.to_json()

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        self.storage.write(self.path(name), as_json(document))

    def remove(self, kind: type[NamedDocument]) -> None:
        """Removes a document; it is overwritten in a store that denies removal."""
        path = self.path(kind.NAME)
        if not self.storage.remove(path) and self.storage.exists(path):
            self.storage.write(path, _TAKEN_BACK)

    def _missing(self, name: str) -> UserError:
        uri = self.storage.uri(self.path(name))
        return UserError(f"{uri} does not exist.", remedy=f"Check store and {self.KIND} name.")


def as_json(document: Mapping[str, Any]) -> bytes:
    """Returns a document's bytes: the same for the same content."""
    return json.dumps(document, indent=1, sort_keys=True).encode()


EXPORTED = re.compile(r"(?P<store>.+)/(?P<prefix>runs/[^/]+/export(-[^/]+)?)/[0-9a-f]{12}$")
"""Address of a run's exported model: an attempt of a bundle."""
# Field of `RunInfo` → variable with its value.
ORIGIN = {"command": "BATON_COMMAND", "commit": "BATON_COMMIT", "until": "BATON_UNTIL"}


class Run(DocumentFolder):
    KIND = "run"

    def create(self, recipe: Recipe, data: FormatVersions | None = None) -> None:
        """Starts a run, or joins one of the same identity; another recipe or format is an OtherRunError.

        `data` has the formats of the run's data, where another run made it.
        """
        head = documents.RunInfo(
            recipe=recipe.model_dump(mode="json"),
            created=now(),
            name=self.name,
            made=FormatVersions.here(RUN_FORMATS, data),
            **_origin(),
        )
        if not self.write_new(head):
            recipe = self.require_same(recipe)
            head = head.model_copy(update={"recipe": recipe.model_dump(mode="json")})
            # Settings that change no bits are the new recipe's. `created` stays: Kubeflow's cache tells runs apart by
            # it. `made` stays: all chunks of the run have the formats it was begun with.
            if (info := self.read(documents.RunInfo)) is None:  # it is no part of the run
                self.write(head)
                return
            before = info.to_json()
            kept: Json = {key: before[key] for key in ("created", *ORIGIN, "made", "voided") if key in before}
            # One whose budget was raised goes on from before its end; no request for a run that had none.
            if info.recipe.get("budget") and (end := self.end(info)) and self._outlasts(end, recipe):
                kept["voided"] = info.voided + 1
            self.put(documents.RunInfo.NAME, {"recipe": head.recipe, "name": self.name, **_origin(), **kept})

    def require_same(self, recipe: Recipe) -> Recipe:
        """Refuses a recipe of another identity, and a run that this Baton does not continue; returns the recipe."""
        head = self.read(documents.RunInfo)
        if head is None:
            return recipe
        self.require_continued(head)
        before = load.stored(head.recipe, origin=self.uri)
        bases = [EXPORTED.sub(r"\g<store>/\g<prefix>", each.model.base or "") for each in (before, recipe)]
        if bases[0] == bases[1]:  # an export that was made again has another address; its content is pinned
            recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": before.model.base})})
        if changed := load.changed_paths(identity(before), identity(recipe)):
            raise OtherRunError(
                f"run {self.name!r} was started with another recipe: {'; '.join(changed)}.",
                remedy="Choose another run name, or set these back.",
            )
        return recipe

    def require_continued(self, head: documents.RunInfo | None = None) -> None:
        (head or self.need(documents.RunInfo)).made.require_continued(f"run {self.name!r}", RUN_FORMATS)

    def recipe(self) -> Recipe:
        head = self.need(documents.RunInfo)
        head.made.require_known(f"run {self.name!r}")
        return load.stored(head.recipe, origin=self.uri)

    def resolved_recipe(self) -> Recipe:
        """Returns the recipe with the learning rate and micro-batch size found for this run."""
        recipe = self.recipe()
        training: dict[str, float] = {}
        if recipe.training.lr_find and (rate := self.read(documents.LearningRate)):
            training["learning_rate"] = rate.learning_rate
        if recipe.training.micro_batch_size == "auto" and (micro_batch := self.read(documents.MicroBatchSize)):
            training["micro_batch_size"] = micro_batch.micro_batch_size
        if not training:
            return recipe
        return recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})

    def plan(self) -> Plan:
        return self.need(Plan)

    def write_once(self, document: NamedDocument) -> None:
        self.set_once(document.file_name(), document.to_json())

    def set_once(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a document; a different one under its name is an OtherRunError."""
        if self.storage.create(self.path(name), as_json(document)):
            return
        if (before := self.raw(name)) is None:  # it is no part of the run
            self.put(name, document)
        elif changed := load.changed_paths(before, document):
            raise OtherRunError(
                f"run {self.name!r} has another {name}: {'; '.join(changed)}.",
                remedy="Choose another run name.",
            )

    def record(self, stage: str, document: Mapping[str, Any]) -> None:
        self.put(f"records/{stage}-{_unique()}.json", {"stage": stage, "at": now(), **document})

    def records(self) -> list[documents.StageRecord]:
        return self.read_all(documents.StageRecord, "records")

    def recorded(self, since: datetime.datetime) -> set[str]:
        # One listing and no reads: names hold the time, see `_unique`.
        names = (name.rsplit("-", 2) for name in self.storage.list(self.path("records")))
        return {stage for stage, moment, _ in names if int(moment) >= since.timestamp() * 1000}

    def note_restart(self, restart: documents.Restart) -> None:
        self.put(f"restarts/{restart.chunk:03d}-{_unique()}.json", restart.to_json())

    def num_restarts(self) -> int:
        return len(self.storage.list(self.path("restarts")))

    def restarts(self) -> list[documents.Restart]:
        return self.read_all(documents.Restart, "restarts")

    def warn(self, text: str) -> None:
        """Warns a person, in the log, on the screen and in the report."""
        events.warn(text)
        with contextlib.suppress(StoreError):
            self.put(f"warnings/{_unique()}.json", documents.WarningRecord(text=text, at=now()).to_json())

    def warnings(self) -> list[documents.WarningRecord]:
        """Returns the warnings by time, each text once."""
        told = self.read_all(documents.WarningRecord, "warnings")
        return list({each.text: each for each in told[::-1]}.values())[::-1]

    def end(self, info: documents.RunInfo) -> documents.RunEnd | None:
        """Returns the decision on the run's end that holds, None before there is one."""
        return self.read(documents.RunEnd, info.voided + 1)

    def _outlasts(self, end: documents.RunEnd, recipe: Recipe) -> bool:
        """Tells whether a recipe's budget pays for a later end than the one decided, with its decay."""
        budget, note = recipe.budget, self.read(documents.Progress)
        if budget is None or note is None or not end.is_voided(budget):
            return end.is_voided(budget)
        # From the last stable step the run has to go farther than it did.
        ahead = (end.last_step - end.stable_until + 1) * note.seconds_per_step
        spent = (note.priced_seconds or note.device_seconds) + ahead * recipe.devices
        passed = budget.passed(moment=time.time() + ahead, started=note.started or time.time(), device_seconds=spent)
        if passed:
            self.warn(f"{passed} pays for no step after {end.last_step}, where the run has ended; it stays as it is")
        return not passed

    def decide_end(self, info: documents.RunInfo, end: documents.RunEnd) -> documents.RunEnd:
        """Commits a decision on the run's end, and returns the first one: another process may have been faster."""
        if self.write_new(end, info.voided + 1):
            return end
        if (first := self.end(info)) is None:  # it is no part of the run
            self.write(end, info.voided + 1)
        return first or end

    def note_skip(self, skip: documents.Skip) -> bool:
        """Notes a step to skip, and tells whether this call was the first to."""
        return self.write_new(skip, skip.step)

    def skips(self) -> list[documents.Skip]:
        return self.read_all(documents.Skip, documents.SKIPS_FOLDER)

    def began(self) -> int:
        """Returns the run's first step: its parent's, for a warm fork."""
        note = self.read(documents.ForkNote)
        return note.step if note and note.warm else 0

    def proven_chunks(self) -> set[int]:
        """Returns the chunks whose checkpoint the checkpoint stage has read back."""
        names = self.storage.list(self.path("proof"))
        return {int(match[1]) for name in names if (match := re.fullmatch(r"chunk-(\d+)\.json", name))}

    def verified_step(self) -> int:
        """Returns the newest step that the checkpoint stage has read back, 0 before there is one."""
        promoted, proven = self.read(documents.Promoted), self.proven_chunks()
        # Of two checkpoint stages at once the slower may promote the older step last; each writes its own proof part.
        part = self.read(documents.ProofPart, max(proven)) if proven else None
        return max(promoted.newest.step if promoted else 0, part.step if part else 0)

    def restored_parts(self) -> list[documents.ProofPart]:
        """Returns the proof of each checkpoint that training resumed from after a kill."""
        return self.read_all(documents.ProofPart, "proof", "restored-")

    def attempts(self, chunk: int | None = None) -> list[documents.ChunkRecord]:
        return self.read_all(
            documents.ChunkRecord, "records", "train-chunk-" if chunk is None else f"train-chunk-{chunk:03d}-"
        )


def identity(recipe: Recipe) -> Json:
    """Returns the part of a recipe that decides the bits a run ends on, and its chunk count.

    Addresses, resources, stages after training and the number of checkpoints do not count; data and the user's code
    count by their digests (`data.json`, `code.json`).
    """
    document = recipe.model_dump(mode="json")
    # Left out, not picked: a new setting belongs to the identity until somebody decides that it changes no bit.
    for section in ("name", "store", "resources", "tracking", "export", "sweep", "trust"):
        del document[section]
    document.pop("budget", None)
    del document["training"]["parallel"]  # the world size is part of the fingerprint
    if workers := recipe.parallel.virtual_workers:  # steps are cut for these, whatever the world size
        document["training"]["parallel"] = {"virtual_workers": workers}
    guard = document["training"].pop("guard")
    if guard:  # skipped steps are part of the state
        document["training"]["guard"] = {name: guard[name] for name in guard if name not in ("skip", "max_skips")}
    rounds = document["training"].pop("tf32")
    if rounds and recipe.training.precision == "fp32":  # another form of the same
        document["training"]["precision"] = "tf32"
    elif rounds is not None and recipe.training.precision != "tf32":
        document["training"]["tf32"] = rounds
    document["evaluation"] = {"every": recipe.evaluation.every}
    if recipe.evaluation.per_epoch:  # else left out: runs from before it was a setting are the same ones
        document["evaluation"]["per_epoch"] = recipe.evaluation.per_epoch
    document["chunks"] = {"count": recipe.num_chunks}
    for name in ("source", "csv", "workers", "shards"):
        del document["data"][name]
    document["data"] = with_older_keys(recipe, document["data"])
    # The other checks change the split, and so the data's digest; this one drops rows at tokenization.
    document["data"]["quality"] = {"truncation": "fix" if recipe.data.quality.truncation == "fix" else None}
    del document["hooks"]["source"]
    learnt = recipe.retrain.learnt
    document["retrain"] = {"learnt": learnt, "replay": recipe.retrain.replay} if learnt else {}
    return document


def with_older_keys(recipe: Recipe, data: Json) -> Json:
    """Returns the section `data` under its older keys, so that a run from before keeps its identity."""
    left_out = {"render_as": "auto", "system": None, "reasoning": "keep", "today": None}
    kept = {key: value for key, value in data.items() if key not in left_out or value != left_out[key]}
    del kept["train_on"]
    return kept | recipe.data.older_train_on


def state_identity(run: Run, recipe: Recipe, plan: Plan) -> str:
    """Returns the digest of recipe, plan, data, model and code, which a checkpoint and its successor share."""
    parts = [
        identity(recipe),
        plan.to_json(),
        # Raw, whatever their keys: a document of an older or newer Baton is hashed as it was written.
        *(run.require(document.NAME) for document in (documents.SplitData, documents.PinnedModels)),
        run.raw(documents.OwnCode.NAME),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def chosen_name(run_name: str, new_name: str, job_id: str, phase: str = "") -> str:
    """Returns the name of a pipeline's run: as given, else a new one with the pipeline run's id; then the phase."""
    name = run_name or f"{new_name}-{job_id}"
    return f"{name}-{phase}" if phase else name


def check_name(name: str) -> str:
    """Returns a run's name; UserError if it cannot be one."""
    if not re.fullmatch(r"[a-z0-9-]{1,100}", name):
        raise UserError(f"run name {name!r} is not lower-case letters, digits and dashes, at most 100.")
    return name


def _origin() -> dict[str, Any]:
    """Returns command, commit and end of a run that begins here, as far as its starter has named them."""
    return {key: value for key, name in ORIGIN.items() if (value := os.environ.get(name))}


def _unique() -> str:
    # Time at a fixed width, so that names sort by it; the rest keeps two of one millisecond in order, and apart.
    milliseconds, rest = divmod(time.time_ns(), 10**6)
    return f"{milliseconds:013d}-{rest:06d}{uuid.uuid4().hex[:6]}"


def now() -> str:
    """Returns the time in UTC, ISO 8601."""
    return iso(time.time())


def iso(seconds: float) -> str:
    """Returns a time since the epoch in UTC, ISO 8601, to the millisecond: later ones sort higher."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_failure(run_uri: str, failure: RunFailure, *, anew: bool = False) -> str | None:
    """Writes a run's failure and page, and returns the page's address, None without such a run; else a BatonError."""
    # In a process of its own, which also ends the tracking run, and can be stopped at a slow store.
    command = [sys.executable, "-m", "baton.pages.publish", run_uri, *(["--anew"] if anew else [])]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(failure.to_json()),
            capture_output=True,
            text=True,
            timeout=FAILURE_TIMEOUT_S,
            env={**os.environ, PATIENCE: str(FAILURE_STORE_S)},
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise BatonError(f"why the run failed could not be kept: {error}.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BatonError(f"why the run failed could not be kept: {lines[-1]}")
    return done.stdout.strip() or None


def clear_failure(run: Run, stage: str | None) -> None:
    """Removes a run's failure in this stage; stage None, for a run that begins again or has ended, is any."""
    run.storage.patience = FAILURE_STORE_S
    try:
        failure = run.read(RunFailure)
        if failure and stage in (None, failure.stage):
            run.remove(RunFailure)
    except BatonError as error:
        logger.warning("why run %s failed before is still told: %s", run.name, error)


_ASKED = ("trials/", "control/", "joins/", "tracking.json")  # a sweep goes on without those that are not signed


class Sweep(DocumentFolder):
    """A sweep, whose documents have a signature each where its recipe names a key: none is obeyed without."""

    KIND = "sweep"
    NOTES: ClassVar = "lost-pods/"  # written by a healer, which has no key

    def _written(self, document: NamedDocument, key: tuple[int | str, ...]) -> Mapping[str, Any]:
        if isinstance(document, documents.PodLoss):
            return document.to_json()
        public = signing.trusted_here()
        # A shell was told no key: the recipe names it.
        if public is None and (head := document if isinstance(document, SweepHead) else self.read(SweepHead)):
            chunks: Any = head.recipe.get("chunks") or {}
            settings = chunks.get("signing")
            public = signing.PublicKey.parse(settings["public_key"]) if settings else None
        return signing.stamped(self.path(document.file_name(*key)), document.to_json(), public)

    def _parsed(self, parse: Callable[[bytes, str], T], data: bytes, path: str) -> T | None:
        where = self.storage.uri(path)
        public = None if path.startswith(self.path(self.NOTES)) else signing.trusted_here()
        try:
            plain = signing.opened(path, load_object(data, where), public)
        except DamagedError:
            return super()._parsed(parse, data, path)
        except signing.SignatureError as error:
            if path.startswith(tuple(map(self.path, _ASKED))):
                events.warn(f"{where} is not used: {error.message}")
                return None
            raise signing.SignatureError(f"{where} is refused: {error.message}", remedy=signing.REFUSED) from None
        return super()._parsed(parse, as_json(plain), path)

    def find(self) -> SweepHead | None:
        """Returns the sweep with all its trials, None before it has begun."""
        head = self.read(SweepHead)
        if head is None:
            return None
        trials = [*head.trials, *self.read_all(TrialEntry, "trials")]
        return head.model_copy(update={"trials": sorted(trials, key=lambda trial: trial.id)})

    def document(self) -> SweepHead:
        head = self.find()
        if head is None:
            raise UserError(f"{self.uri}/sweep.json does not exist.", remedy="Check the sweep's name and the store.")
        return head

    def trial(self, trial_id: str) -> TrialEntry:
        trials = {trial.id: trial for trial in self.document().trials}
        if trial_id not in trials:
            raise UserError(f"sweep {self.name!r} has no trial {trial_id!r}.", remedy=f"It has {', '.join(trials)}.")
        return trials[trial_id]

    def add(self, trial: TrialEntry) -> bool:
        """Adds a trial, and tells whether this call did; the first of one id stays."""
        return self.write_new(trial, trial.id)

    def run(self, trial: TrialEntry) -> Run:
        return Run(self.storage, trial.run)

    def entered(self, head: SweepHead, number: int) -> list[str]:
        """Returns the trials with which a rung begins; BatonError if the rung before it was not judged."""
        if head.chunks(number)[0] == 1:
            return [trial.id for trial in head.trials if trial.bracket == head.rungs[number - 1].bracket]
        before = self.rung(number - 1)
        if before is None:
            raise BatonError(f"rung {number - 1} of sweep {self.name!r} was not judged.")
        known = {trial.id for trial in head.trials}
        return [trial for trial in before.kept if trial in known]

    def rungs(self) -> list[RungVerdict]:
        return self.read_all(RungVerdict, "rungs")

    def rung(self, number: int) -> RungVerdict | None:
        return self.read(RungVerdict, number)

    def scores(self, run: str | Run) -> list[TrialScore]:
        return (run if isinstance(run, Run) else Run(self.storage, run)).read_all(TrialScore, "scores")

    def requests(self) -> dict[str, TrialRequest]:
        """Returns the newest request for each trial that has one."""
        names = [name.removesuffix(".json") for name in self.storage.list(self.path("control"))]
        found = zip(names, self.storage.runtime.each(self.request, names), strict=True)
        return {trial: request for trial, request in found if request}

    def request(self, trial_id: str) -> TrialRequest | None:
        return self.read(TrialRequest, trial_id)

    def ask(self, trial_id: str, state: TrialState, why: str) -> None:
        """Writes a request, taken up at the trial's next chunk boundary."""
        self.write(TrialRequest(state=state, why=why, at=now()), trial_id)
