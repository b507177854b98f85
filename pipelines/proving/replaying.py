"""A chunk of another run, trained again here: in a store of its own, from the checkpoint that it began with.

Nothing is written to the run's own store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.errors import BatonError, DamagedError, UserError
from baton.components.shared.core.events import Event
from baton.components.shared.core.patience import through_skips
from baton.components.shared.core.signing import SIGNED_BY
from baton.components.shared.forks import forking
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.data import ORIGINS, OwnCode, RunHead, Tokens
from baton.components.shared.runs.documents.training import ForkNote
from baton.components.shared.runs.run import Run, identity
from baton.components.shared.store import bundles
from baton.components.shared.store.bundles import Manifest
from baton.components.shared.store.storage import Storage
from baton.pipelines.local import processes, warm
from baton.pipelines.local.processes import TRAIN_CHUNK


@dataclass(frozen=True)
class Stretch:
    """A chunk as the run has it.

    Attributes:
        index: Its number.
        start: Step that it began at.
        before: The checkpoint there, None at the start of the run.
        after: The checkpoint that it ended on.
    """

    index: int
    start: int
    before: Checkpoint | None
    after: Checkpoint


def stretch(store: CheckpointStore, index: int) -> Stretch:
    """Returns a chunk of a run, by its number from 1.

    Raises:
        UserError: there is no such chunk, or a checkpoint that it takes is gone.
    """
    plan = store.run.plan()
    if not 1 <= index <= len(plan.targets):
        raise UserError(f"chunk {index} does not exist; run {store.run.name!r} has {len(plan.targets)}.")
    start = max(plan.target(index - 1) if index > 1 else 0, forking.began(store.run))
    if plan.target(index) <= start:
        raise UserError(f"chunk {index} ends before step {start}, at which the fork {store.run.name!r} begins.")
    after = _ended(store, start, plan.target(index))
    if after is None:
        raise _gone(store, index, plan.target(index), "it ended on")
    if after.step <= start:
        ended = f"early stopping ended the run at step {after.step}"
        raise UserError(f"chunk {index} of run {store.run.name!r} was not trained: {ended}.")
    before = store.read(start) if start else None
    if start and before is None:
        raise _gone(store, index, start, "it began with")
    return Stretch(index, start, before, after)


def _ended(store: CheckpointStore, start: int, target: int) -> Checkpoint | None:
    """Returns what is committed at a target, or where early stopping ended the run before."""
    if checkpoint := store.read(target):
        return checkpoint
    finished = (each for each in store.committed() if each.meta.finished and each.step < target)
    return next(finished, None)


def _gone(store: CheckpointStore, index: int, step: int, which: str) -> UserError:
    steps = store.committed_steps()
    return UserError(
        f"chunk {index} of run {store.run.name!r} cannot be audited: the checkpoint that {which}, of step {step}, is "
        f"gone; steps {', '.join(map(str, steps)) or '(none)'} are here.",
        remedy="Retention takes it, unless the recipe says chunks.keep.audit: true. A chunk that is still there can be "
        "audited, and a run that is trained again with it.",
    )


class Replay:
    """A run in a store of its own, ready to train one chunk of another.

    Args:
        store: The other run's checkpoints.
        chunk: The chunk.
        folder: Where the store of its own lies.
        on_event: Called with each event of the processes.
    """

    def __init__(
        self,
        store: CheckpointStore,
        chunk: Stretch,
        folder: str,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._theirs, self._chunk = store, chunk
        self._run = Run(Storage(folder), store.run.name)
        self._on_event = on_event

    def make_data(self, recipe: Recipe) -> list[str]:
        """Splits and tokenizes the rows of a recipe that somebody has, and returns in what they differ from the run's.

        Args:
            recipe: The recipe, its paths absolute.

        Raises:
            UserError: it is not the one that the run was trained by.
            BatonError: a process failed, with its message.
        """
        theirs = self._theirs.run
        if changed := recipe_file.changed_paths(identity(theirs.recipe()), identity(recipe)):
            raise UserError(
                f"run {theirs.name!r} was trained by another recipe: {'; '.join(changed)}.",
                remedy="Give the recipe that it was trained by, or none to take the one that lies with the run.",
            )
        # Begun on the same day, which a chat template may write.
        self._run.put(RunHead.NAME, theirs.require(RunHead.NAME) | {"recipe": self._plain(recipe)})
        with _unsigned():
            processes.prepare(self._local(recipe), self._run.name, self._on_event, warm.launcher())
        same = {
            "rows": theirs.require("data.json") == self._run.require("data.json"),
            "tokens": _tokens(theirs) == _tokens(self._run),
            "base model": theirs.get("model.json") == self._run.get("model.json"),
            "plan": theirs.require("plan.json") == self._run.require("plan.json"),
        }
        return [name for name, is_same in same.items() if not is_same]

    def copy_data(self) -> None:
        """Takes the rows, as tokens, from the run's store, every byte compared with what was committed there."""
        theirs = self._theirs.run
        self._run.put(RunHead.NAME, theirs.require(RunHead.NAME) | {"recipe": self._plain(theirs.recipe())})
        for name in (*forking.CARRIED, "plan.json"):
            if document := theirs.get(name):
                self._run.put(name, document)
        tokens, code = theirs.need(Tokens), theirs.read(OwnCode)
        for prefix in (tokens.prefix, *([code.prefix] if code else [])):
            self._copy_bundle(prefix)

    def train(self) -> Checkpoint:
        """Trains the chunk and returns what it came to.

        Raises:
            BatonError: its process failed, with its message.
        """
        self._copy_rest()
        if self._chunk.before:
            self._copy_bundle(self._theirs.prefix(self._chunk.start))
        launch = warm.launcher()
        with _unsigned():
            arguments = [self._run.uri, str(self._chunk.index)]
            through_skips(partial(processes.run, TRAIN_CHUNK, arguments, self._on_event, launch))
            reached = CheckpointStore(self._run).newest()
        if reached is None or reached.step <= self._chunk.start:
            raise BatonError(f"chunk {self._chunk.index} left no checkpoint when it was trained again.")
        return reached

    def folder(self, checkpoint: Checkpoint) -> str:
        """Returns the local folder of a checkpoint that was trained here."""
        store = CheckpointStore(self._run)
        return self._run.storage.key(checkpoint.manifest.path(store.prefix(checkpoint.step)))

    def _local(self, recipe: Recipe) -> Recipe:
        return recipe_file.validate(self._plain(recipe), origin=recipe.name)

    def _plain(self, recipe: Recipe) -> dict[str, object]:
        """Returns a recipe as it is trained by here: nothing is tracked, signed or kept that no bit depends on."""
        document = recipe.model_dump(mode="json")
        document["store"] = {"uri": str(self._run.storage.key(""))}
        document["tracking"] = {"mlflow": None}
        document["chunks"] |= {
            "signing": None,
            "checkpoint_every": None,
            "checkpoints_per_epoch": None,
            "exactness": "consistent",
        }
        return document

    def _copy_rest(self) -> None:
        """Takes what the chunk looks for besides: what was found out, skipped steps, what a fork began with."""
        theirs = self._theirs.run
        names = [name for name in theirs.storage.find(theirs.path()) if name.startswith(("skips/", "start/"))]
        documents = (*forking.CARRIED[5:], ForkNote.NAME, ORIGINS)
        for name in (*names, *documents):
            with contextlib.suppress(FileNotFoundError):
                self._run.storage.write(self._run.path(name), theirs.storage.read(theirs.path(name)))

    def _copy_bundle(self, prefix: str) -> None:
        storage = self._theirs.storage
        manifest = bundles.read_manifest(storage, prefix)
        if manifest is None:
            raise BatonError(f"{storage.uri(prefix)} is gone, without which no chunk can be trained again.")
        target = Path(self._run.storage.key(prefix))
        fetch(storage, prefix, manifest, str(target / manifest.folder))
        (target / "manifest.json").write_text(manifest.as_written())


def fetch(storage: Storage, prefix: str, manifest: Manifest, folder: str) -> str:
    """Downloads a bundle as `bundles.fetch` does, but marks nothing in the store: an audit only reads there.

    Returns:
        The folder.

    Raises:
        DamagedError: a file is missing or its SHA-256 differs.
    """
    for name, entry in sorted(manifest.files.items()):
        local = os.path.join(folder, name)
        os.makedirs(os.path.dirname(local), exist_ok=True)
        try:
            digest = storage.download(manifest.path(prefix, name), local, entry["size"])
        except FileNotFoundError:
            digest = "missing"
        if digest != entry["sha256"]:
            raise DamagedError(
                f"{storage.uri(manifest.path(prefix, name))} is not what was committed: its SHA-256 is {digest}, "
                f"committed was {entry['sha256']}."
            )
    return folder


def _tokens(run: Run) -> object:
    """Returns what tells tokenized rows apart: content and order of their files, whatever their names."""
    tokens = run.need(Tokens)
    manifest = bundles.read_manifest(run.storage, tokens.prefix)
    if manifest is None:
        return None
    digests = {name: entry["sha256"] for name, entry in manifest.files.items()}
    listed = {side: [digests[name] for name, _ in files] for side, files in manifest.meta["files"].items()}
    return listed, {name: digest for name, digest in digests.items() if name.startswith("tokenizer/")}


@contextlib.contextmanager
def _unsigned() -> Iterator[None]:
    """Asks for no signature for a while: what is trained here is signed by nobody."""
    before = os.environ.pop(SIGNED_BY, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[SIGNED_BY] = before
