"""A run in the store: its recipe, plan, records and checkpoints, by name.

runs/<run>/recipe.json, data.json, plan.json, evaluation.json, report.html
runs/<run>/records/<stage>-….json     what each attempt at a stage did, one object each
runs/<run>/restarts/<chunk>-….json   a process of a chunk that was lost, each
runs/<run>/warnings/….json            what a person was told, each
runs/<run>/skips/step-….json          a step that is skipped, each
runs/<run>/checkpoints/step-…/        see `checkpoints.store`
runs/<run>/export/, exports/<format>/ bundles
data/<digest>/{split,tokens,…}        bundles shared between runs
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from baton.components.shared.core import events
from baton.components.shared.core.document import Document, Json, NamedDocument
from baton.components.shared.core.errors import OtherRunError, StoreError, UserError
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.data import OwnCode, PinnedModels, RunHead, SplitData
from baton.components.shared.runs.documents.skips import FOLDER, Skip
from baton.components.shared.runs.documents.training import (
    ChunkRecord,
    LearningRate,
    MicroBatch,
    Restart,
    StageRecord,
    Warning,
)
from baton.components.shared.runs.folder import Documents
from baton.components.shared.runs.formats import OF_RUN, Made
from baton.components.shared.runs.plan import Plan

R = TypeVar("R", bound=Document)


class Run(Documents):
    """One run, addressed by the store and its name."""

    KIND = "run"

    def create(self, recipe: Recipe, data: Made | None = None) -> None:
        """Starts a run, or joins one started with the same recipe; settings that change no bits may differ.

        Args:
            recipe: The recipe.
            data: What the run's data was made with, where that is another run's.

        Raises:
            OtherRunError: the run exists with a recipe that trains something else, or by a Baton that this one does not
                continue.
        """
        head = RunHead(
            recipe=recipe.model_dump(mode="json"), created=now(), name=self.name, made=Made.here(OF_RUN, data)
        )
        if not self.put_new(RunHead.NAME, head.to_json()):
            self.require_same(recipe)
            # Its settings that change no bits are the new recipe's. `created` stays: Kubeflow's cache tells runs apart
            # by it. So does what the run was begun with: it is what all its chunks have alike.
            before = self.need(RunHead).to_json()
            kept: Json = {key: before[key] for key in ("created", "made") if key in before}
            self.put(RunHead.NAME, {"recipe": head.recipe, "name": self.name, **kept})

    def require_same(self, recipe: Recipe) -> None:
        """Compares a recipe with the one this run was started with, if it was.

        Raises:
            OtherRunError: they would train something else, or this Baton does not continue what the run was begun with.
        """
        head = self.read(RunHead)
        if head is None:
            return
        self.require_continued(head)
        before = recipe_file.validate(head.recipe, origin=self.uri)
        if changed := recipe_file.changed_paths(identity(before), identity(recipe)):
            raise OtherRunError(
                f"run {self.name!r} was started with another recipe: {'; '.join(changed)}.",
                remedy="Choose another run name, or set these back.",
            )

    def require_continued(self, head: RunHead | None = None) -> None:
        """Checks that this Baton continues what the run was begun with.

        Args:
            head: What the run says of itself, where it is read already.

        Raises:
            FormatError: it does not.
        """
        (head or self.need(RunHead)).made.require_continued(f"run {self.name!r}", OF_RUN)

    def recipe(self) -> Recipe:
        """Returns the recipe the run was started with.

        Raises:
            UserError: there is no such run, or a newer Baton began it.
        """
        head = self.need(RunHead)
        head.made.require_known(f"run {self.name!r}")
        return recipe_file.validate(head.recipe, origin=self.uri)

    def resolved_recipe(self) -> Recipe:
        """Returns the recipe with what was found out for this run in its place: learning rate, micro-batch size."""
        recipe = self.recipe()
        training: dict[str, float] = {}
        if recipe.training.lr_find and (rate := self.read(LearningRate)):
            training["learning_rate"] = rate.learning_rate
        if recipe.training.micro_batch_size == "auto" and (micro_batch := self.read(MicroBatch)):
            training["micro_batch_size"] = micro_batch.micro_batch_size
        if not training:
            return recipe
        return recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})

    def plan(self) -> Plan:
        """Returns the run's plan."""
        return self.need(Plan)

    def write_once(self, document: NamedDocument) -> None:
        """Writes a document of the run; a different one under the same name is an error.

        Raises:
            OtherRunError: it was written before, and differs.
        """
        self.set_once(document.file_name(), document.to_json())

    def set_once(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a document of the run; a different one under the same name is an error.

        Raises:
            OtherRunError: it was written before, and differs.
        """
        if self.put_new(name, document):
            return
        if changed := recipe_file.changed_paths(self.require(name), document):
            raise OtherRunError(
                f"run {self.name!r} has another {name}: {'; '.join(changed)}.",
                remedy="Choose another run name.",
            )

    def record(self, stage: str, document: Mapping[str, Any]) -> None:
        """Keeps what one attempt at a stage did, under its own name."""
        self.put(f"records/{stage}-{_unique()}.json", {"stage": stage, "at": now(), **document})

    def records(self) -> list[StageRecord]:
        """Returns all attempts at all stages, by stage and time."""
        return self._records(StageRecord, "")

    def recorded(self, since: datetime.datetime) -> set[str]:
        """Returns the stages that have left a record since a moment, by one listing: names hold the time."""
        names = (name.rsplit("-", 2) for name in self.storage.list(self.path("records")))
        return {stage for stage, moment, _ in names if int(moment) >= since.timestamp() * 1000}

    def note_restart(self, restart: Restart) -> None:
        """Keeps that a chunk's process was lost, and is followed by another one."""
        self.put(f"restarts/{restart.chunk:03d}-{_unique()}.json", restart.to_json())

    def num_restarts(self) -> int:
        """Returns how many processes of chunks were lost and followed by another one, by one listing."""
        return len(self.storage.list(self.path("restarts")))

    def restarts(self) -> list[Restart]:
        """Returns the processes of chunks that were lost and followed by another one, by chunk and time."""
        paths = [self.path(f"restarts/{name}") for name in self.storage.list(self.path("restarts"))]
        return [Restart.read(self.storage.read(path), self.storage.uri(path)) for path in paths]

    def warn(self, text: str) -> None:
        """Tells a person that something goes on without what it was to do: in the log, on the screen, in the report."""
        events.warn(text)
        with contextlib.suppress(StoreError):
            self.put(f"warnings/{_unique()}.json", Warning(text=text, at=now()).to_json())

    def warnings(self) -> list[Warning]:
        """Returns what a person was told, each text once, by time."""
        paths = [self.path(f"warnings/{name}") for name in sorted(self.storage.list(self.path("warnings")))]
        told = [Warning.read(self.storage.read(path), self.storage.uri(path)) for path in paths]
        return list({each.text: each for each in told[::-1]}.values())[::-1]

    def note_skip(self, skip: Skip) -> bool:
        """Keeps that a step is skipped, and tells whether this call did; who finds it first says why."""
        return self.put_new(skip.file_name(skip.step), skip.to_json())

    def skips(self) -> list[Skip]:
        """Returns the steps that the run's guard has found, in their order."""
        names = self.storage.list(self.path(FOLDER))  # beside them there may be leases, see `store.lease`
        paths = [self.path(f"{FOLDER}/{name}") for name in names if name.endswith(".json")]
        return [Skip.read(self.storage.read(path), self.storage.uri(path)) for path in paths]

    def attempts(self, chunk: int | None = None) -> list[ChunkRecord]:
        """Returns all attempts at all chunks, or at one, by chunk and time."""
        return self._records(ChunkRecord, "train-chunk-" if chunk is None else f"train-chunk-{chunk:03d}-")

    def _records(self, kind: type[R], prefix: str) -> list[R]:
        names = self.storage.list(self.path("records"))
        wanted = [self.path(f"records/{name}") for name in names if name.startswith(prefix)]
        return [kind.read(self.storage.read(path), self.storage.uri(path)) for path in wanted]


def identity(recipe: Recipe) -> Json:
    """Returns the part of a recipe that decides the bits a run ends on, and its chunk count.

    Where things lie, what pods ask for, what happens after training and how often a checkpoint is
    written do not count; data and the user's code count by their digests (`data.json`, `code.json`), not by address.
    """
    document = recipe.model_dump(mode="json")
    # By what is left out, not by what is taken: a new setting is part of the identity until somebody decides that it
    # changes no bit.
    for section in ("name", "store", "resources", "tracking", "export", "sweep", "trust"):
        del document[section]
    del document["training"]["parallel"]  # the world size is part of the fingerprint
    if workers := recipe.parallel.virtual_workers:  # for which steps are cut, whatever the world size
        document["training"]["parallel"] = {"virtual_workers": workers}
    guard = document["training"].pop("guard")
    if guard:  # which steps are skipped is part of the state
        document["training"]["guard"] = {name: guard[name] for name in guard if name not in ("skip", "max_skips")}
    rounds = document["training"].pop("tf32")
    if rounds and recipe.training.precision == "fp32":  # another way to say the same
        document["training"]["precision"] = "tf32"
    elif rounds is not None and recipe.training.precision != "tf32":
        document["training"]["tf32"] = rounds
    document["evaluation"] = {"every": recipe.evaluation.every}
    if recipe.evaluation.per_epoch:  # else left out: runs from before it was a setting are the same ones
        document["evaluation"]["per_epoch"] = recipe.evaluation.per_epoch
    document["chunks"] = {"count": recipe.num_chunks}
    for name in ("source", "csv", "workers", "shards"):
        del document["data"][name]
    del document["data"]["train_on"]  # under the keys it had before, so that a run from then is the same one
    document["data"] |= recipe.data.older_train_on
    for name, left_out in (("render_as", "auto"), ("system", None), ("reasoning", "keep"), ("today", None)):  # likewise
        if document["data"][name] == left_out:
            del document["data"][name]
    # What the other checks mend or drop is in the data's digest; this one drops rows when they are tokens.
    document["data"]["quality"] = {"truncation": "fix" if recipe.data.quality.truncation == "fix" else None}
    del document["hooks"]["source"]
    learnt = recipe.retrain.learnt
    document["retrain"] = {"learnt": learnt, "replay": recipe.retrain.replay} if learnt else {}
    return document


def state_identity(run: Run, recipe: Recipe, plan: Plan) -> str:
    """Returns the digest of what must be the same for a checkpoint to be continued: recipe, data, model, code, plan.

    Args:
        run: The run, its data split and tokenized.
        recipe: Its recipe, resolved.
        plan: Its plan.
    """
    parts = [
        identity(recipe),
        plan.to_json(),
        # As they lie there, whatever their keys: what an older or newer Baton wrote is hashed as it was.
        *(run.require(document.NAME) for document in (SplitData, PinnedModels)),
        run.get(OwnCode.NAME),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def chosen_name(run_name: str, new_name: str, job_id: str, phase: str = "") -> str:
    """Returns the name of the run that a pipeline trains.

    Args:
        run_name: The one that was asked for, empty for a new one.
        new_name: What the name of a new run begins with.
        job_id: What it ends in: the id of the pipeline's run.
        phase: Name of one training of several, empty where there is one.
    """
    name = run_name or f"{new_name}-{job_id}"
    return f"{name}-{phase}" if phase else name


def check_name(name: str) -> str:
    """Returns a run's name if it can be one.

    Raises:
        UserError: it is not lower-case letters, digits and dashes.
    """
    if not re.fullmatch(r"[a-z0-9-]{1,100}", name):
        raise UserError(f"run name {name!r} is not lower-case letters, digits and dashes, at most 100.")
    return name


def _unique() -> str:
    """Returns the end of a name: the time at a fixed width, by which names sort, and what keeps one millisecond's
    apart."""
    return f"{int(time.time() * 1000):013d}-{uuid.uuid4().hex[:6]}"


def now() -> str:
    """Returns the time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
