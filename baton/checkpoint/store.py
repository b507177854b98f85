"""Checkpoints of a run: committed by manifest, found by step, verified by hashes, and merged if in shards."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from baton.checkpoint import sharded
from baton.checkpoint.sharded import code_in, may_be_pickle
from baton.checkpoint.signatures import SIGNATURE, Sources, require_signed, require_signer, sign, sources_of
from baton.documents import Document, load_object
from baton.errors import DamagedError, FormatError, UserError
from baton.recipe.recipe import Recipe
from baton.runs.documents import ForkOrigin, OwnState, RunCost, Transfer
from baton.runs.run import Run
from baton.runs.versions import CHECKPOINT_FORMATS, Fingerprint, FormatVersions
from baton.scratch import scratch_folder
from baton.signing import PublicKey, SignatureError, required, trusted_here
from baton.store import bundle
from baton.store.bundle import MAX_COPY_DEPTH, BundleWriter, CopySources
from baton.store.cache import NodeCache
from baton.store.manifest import DAMAGED, Manifest, read_manifest

TRAINING_FILES = re.compile(r"(^optimizer|^scheduler|^scaler|^rng_state|^baton_state|^trainer_state)")
"""Beginnings of names that only training needs."""
SHARD_SIZE_FORM = re.compile(r"[1-9][0-9]*(KB|MB|GB)")
LOG_FILE = "trainer_state.json"
LogEntry = dict[str, float]
"""What a trainer logged at a step: names, `step` among them, and numbers."""
_STEP = re.compile(r"^step-(\d{8,})$")


class Parent(Document):
    """The checkpoint that was newest when this one was made."""

    step: int
    digest: str
    manifest: str = ""
    """SHA-256 of its manifest, where that is signed; see `signatures.manifest_digest`."""


class Restoration(Document):
    """The checkpoint that the process which made this one had resumed from."""

    step: int = 0
    """Its step; 0 at the start of a run."""
    checked: dict[str, str] | None = None
    """Part of the state → `match`, `mismatch`, `absent`, `left out` or `of other processes`."""
    level: str = "bitwise"
    """`bitwise`, or `consistent` where the machine differed or state of the user's code was not restored."""
    skipped: list[str] = Field(default_factory=list)
    """Why newer checkpoints were passed over."""


class CheckpointMeta(Document):
    """Whose state a checkpoint holds, made by what, where and at what cost."""

    run: str = ""
    step: int = 0
    digest: str
    """Digest of the whole state in memory when it was captured."""
    state: dict[str, str] = Field(default_factory=dict)
    """Part of the state → its digest, and `state` → all of them."""
    parent: Parent | None = None
    """None for the first checkpoint of a run."""
    chain: str = ""
    """Digest over the digests of this checkpoint and all before it."""
    restored: Restoration = Restoration()
    identity: str = ""
    """Digest of recipe, data, model, code and plan, see `run.state_identity`."""
    finished: bool = False
    """Whether early stopping ended the run here."""
    fingerprint: Fingerprint = Fingerprint()
    trainable_parameters: int = 0
    chunk: int = 0
    created: str = ""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phase → seconds of the process that made it."""
    moved: Transfer = Transfer()
    work: RunCost = RunCost()
    forked_from: ForkOrigin | None = None
    skips: list[int] = Field(default_factory=list)
    """Steps up to this one that were skipped, those of its parent's run too; see `training.guard`."""
    hooks: OwnState | None = None
    """State of the user's code; None where a Baton wrote the checkpoint that did not look for any."""
    sources: Sources | None = None
    """What it was made of, where it is signed."""
    made: FormatVersions = FormatVersions()
    """What it was written with."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: the step at whose end it was captured, its files, and whose state it is."""

    step: int
    manifest: Manifest
    meta: CheckpointMeta

    @property
    def digest(self) -> str:
        """Digest of the state."""
        return self.meta.digest

    @property
    def bytes(self) -> int:
        """Total size of its files."""
        return self.manifest.bytes

    def require_continued(self, *names: str) -> None:
        """Raises `FormatError` where this Baton does not continue what it was written with.

        Args:
            names: The formats that matter, see `versions.FORMATS`; all of a checkpoint's when left out.
        """
        what = f"the checkpoint of step {self.step} of run {self.meta.run!r}"
        self.meta.made.require_continued(what, names or CHECKPOINT_FORMATS)


class CheckpointStore:
    """The checkpoints of one run, `runs/<run>/checkpoints/step-NNNNNNNN/`.

    Args:
        run: The run.
        signed_by: Key whose signature they must have, and by which new ones are signed; when left out, the one that
            this process was given, if it was.
    """

    def __init__(self, run: Run, signed_by: PublicKey | None = None) -> None:
        self.run = run
        self.storage = run.storage
        self.signed_by = signed_by or trusted_here()

    @classmethod
    def of(cls, run: Run, recipe: Recipe) -> CheckpointStore:
        """Returns the checkpoints of a run whose recipe may ask for signatures; see `signing.required`."""
        signing = recipe.chunks.signing
        return cls(run, required(signing.public_key, f"run {run.name!r}") if signing else None)

    def prefix(self, step: int) -> str:
        """Returns where the checkpoint of a step lies in the store."""
        return self.run.path(f"checkpoints/step-{step:08d}")

    def uri(self, checkpoint: Checkpoint) -> str:
        """Returns the folder that `from_pretrained` and `resume_from_checkpoint` read."""
        return self.storage.uri(checkpoint.manifest.path(self.prefix(checkpoint.step)))

    def steps(self) -> list[int]:
        """Returns the steps under which anything was written, ascending; not all are committed."""
        names = self.storage.list(self.run.path("checkpoints"))
        return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))

    def read(self, step: int, names: Sequence[str] | None = None) -> Checkpoint | None:
        """Returns the checkpoint that is committed for a step, or None.

        Args:
            step: The step.
            names: What lies directly below it, where that has been listed.

        Raises:
            DamagedError: the manifest is unreadable, was marked, or belongs to another run or step.
            FormatError: a newer Baton wrote it.
        """
        manifest = read_manifest(self.storage, self.prefix(step), names)
        return self._checked(step, manifest) if manifest else None

    def committed(
        self, on_damaged: Callable[[int, DamagedError], None] | None = None, *, after: int = 0
    ) -> Iterator[Checkpoint]:
        """Yields committed checkpoints, newest first.

        Args:
            on_damaged: Called with the step and the error of each whose manifest is damaged, in its turn.
            after: Step below those that are wanted.
        """
        # One listing; manifests are read as they are asked for, so that who wants the newest alone pays for one.
        for step in reversed(self.steps()):
            if step <= after:
                return
            try:
                checkpoint = self.read(step)
            except DamagedError as error:
                if on_damaged:
                    on_damaged(step, error)
                continue
            if checkpoint:
                yield checkpoint

    def committed_steps(self) -> list[int]:
        """Returns the steps that are committed, ascending."""
        return sorted(checkpoint.step for checkpoint in self.committed())

    def newest(self) -> Checkpoint | None:
        """Returns the newest committed checkpoint."""
        return next(self.committed(), None)

    def whole(self) -> Iterator[Checkpoint]:
        """Yields committed checkpoints whose files are all there in full size, newest first."""
        return (checkpoint for checkpoint in self.committed() if self.is_whole(checkpoint))

    def is_whole(self, checkpoint: Checkpoint) -> bool:
        """Tells whether all files of a checkpoint are there in full size, which costs one listing."""
        return bundle.is_whole(self.storage, self.prefix(checkpoint.step), checkpoint.manifest)

    def open_writer(self, step: int, check: Callable[[], None] = lambda: None) -> BundleWriter:
        """Begins an attempt at a checkpoint; see `bundle.BundleWriter`."""
        find = partial(self.ancestors, step)
        return BundleWriter(self.storage, self.prefix(step), kind="checkpoint", check=check, find_copy_sources=find)

    def ancestors(self, step: int) -> CopySources:
        """Returns the newest checkpoints before a step whose files its own may be copies of."""
        found: list[tuple[str, Manifest]] = []
        for number in reversed(self.steps()):
            names = self.storage.list(self.prefix(number))
            try:
                checkpoint = self.read(number, names)
            except (DamagedError, FormatError):
                break
            if checkpoint and number < step:
                found.append((self.prefix(number), checkpoint.manifest))
            # What was damaged there may be so in those before it, of which its files may be copies; also where it is
            # this step, which is made anew.
            if len(found) == MAX_COPY_DEPTH or any(name.startswith(DAMAGED) for name in names):
                break
        return CopySources(found)

    def commit(self, step: int, writer: BundleWriter, meta: CheckpointMeta) -> tuple[Checkpoint, bool]:
        """Commits what was sent; see `bundle.BundleWriter.commit`."""
        # Run and step last: `_checked` compares them, and a folder copied from elsewhere is found out by them.
        stated: dict[str, Any] = {**meta.to_json(), "run": self.run.name, "step": step}
        if self.signed_by:
            # Anew: a fork's first checkpoint comes with its parent's.
            stated = {**stated, "sources": sources_of(self.run).to_json()}
            stated.pop(SIGNATURE, None)
            stated[SIGNATURE] = sign(writer.manifest(stated), self.signed_by)
        manifest, ours = writer.commit(stated)
        return self._checked(step, manifest), ours

    def require_signer(self) -> None:
        """Checks that this process can sign, where signatures are asked for; see `signatures.require_signer`."""
        if self.signed_by:
            require_signer(self.signed_by)

    def fetch(
        self, checkpoint: Checkpoint, local_dir: str, cache: NodeCache | None = None, names: Iterable[str] | None = None
    ) -> str:
        """Downloads a checkpoint, every byte checked; see `bundle.fetch`.

        Raises:
            SignatureError: it must be signed, and has a file that was not: whoever reads the folder would read it too.
        """
        prefix, manifest = self.prefix(checkpoint.step), checkpoint.manifest
        if self.signed_by and (unlisted := self.storage.find(manifest.path(prefix)).keys() - manifest.files.keys()):
            raise SignatureError(
                f"{self.uri(checkpoint)} is refused: {', '.join(sorted(unlisted))} was not signed.",
                remedy="Find out who put it there, and remove it.",
            )
        return bundle.fetch(self.storage, prefix, manifest, local_dir, cache, names)

    def verify(self, checkpoint: Checkpoint) -> list[str]:
        """Reads a checkpoint back; see `bundle.verify`."""
        return bundle.verify(self.storage, self.prefix(checkpoint.step), checkpoint.manifest)

    def require_whole(self, checkpoint: Checkpoint, problems: list[str]) -> None:
        """Marks a checkpoint in which problems were found; see `bundle.require_whole`."""
        bundle.require_whole(self.storage, self.prefix(checkpoint.step), checkpoint.manifest, problems)

    def code(self, checkpoint: Checkpoint) -> list[str]:
        """Returns a line for each pickle of a whole checkpoint that holds code; see `sharded.code_in`."""
        manifest, prefix = checkpoint.manifest, self.prefix(checkpoint.step)
        with scratch_folder("pickles") as folder:
            for name in manifest.files:
                if may_be_pickle(name):
                    self.storage.download(manifest.path(prefix, name), os.path.join(folder, name))
            return code_in(folder)

    def history(self, checkpoint: Checkpoint) -> list[LogEntry]:
        """Returns the logged values of the run up to a checkpoint, from its `trainer_state.json`.

        Raises:
            DamagedError: it holds none.
        """
        path = checkpoint.manifest.path(self.prefix(checkpoint.step), LOG_FILE)
        where = self.storage.uri(path)
        if LOG_FILE not in checkpoint.manifest.files:
            raise DamagedError(f"{where} is not there, and its manifest does not name it.")
        history = load_object(self.storage.read(path), where).get("log_history")
        if not isinstance(history, list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("step"), int) for entry in history
        ):
            raise DamagedError(f"{where} has no log_history of steps with numbers.")
        return history

    def evaluation_losses(self, checkpoint: Checkpoint) -> dict[int, float]:
        """Returns the evaluation losses of the run up to a checkpoint that are numbers, by step."""
        return evaluation_losses(self.history(checkpoint))

    def _checked(self, step: int, manifest: Manifest) -> Checkpoint:
        """Returns a manifest that was found, with its meta read.

        Raises:
            DamagedError: it belongs to another run or step, or is not that of a checkpoint.
            SignatureError: nobody signed it whose signature is asked for. It is never passed over: whoever may write to
                the store would decide where the run goes on.
            FormatError: a newer Baton wrote it.
        """
        where = self.storage.uri(self.prefix(step))
        if self.signed_by:
            require_signed(manifest, self.signed_by, f"the checkpoint of step {step} in {where}")
        stated = (manifest.kind, manifest.meta.get("run"), manifest.meta.get("step"))
        if stated != ("checkpoint", self.run.name, step):
            # One that is signed and lies elsewhere was put there.
            kind = SignatureError if self.signed_by else DamagedError
            raise kind(f"{where}: its manifest says {stated}, not this run's.")
        return self.as_checkpoint(step, manifest)

    def as_checkpoint(self, step: int, manifest: Manifest) -> Checkpoint:
        """Returns a manifest with its meta read.

        Raises:
            DamagedError: it is not that of a checkpoint.
            FormatError: a newer Baton wrote it.
        """
        if not manifest.files:
            raise DamagedError(f"{self.storage.uri(self.prefix(step))}: its manifest names no files.")
        meta = CheckpointMeta.read(manifest.meta, self.storage.uri(self.prefix(step)))
        # Refused to every reader: one that is passed over as damaged would be written anew, and retention take others.
        meta.made.require_known(f"the checkpoint of step {step} of run {self.run.name!r}")
        return Checkpoint(step, manifest, meta)


def evaluation_losses(history: Iterable[LogEntry]) -> dict[int, float]:
    """Returns the evaluation losses that are numbers, by step."""
    losses = {int(entry["step"]): entry["eval_loss"] for entry in history if "eval_loss" in entry}
    return {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}


def merge_model(store: CheckpointStore, checkpoint: Checkpoint, folder: str, shard_size: str) -> dict[str, Any]:
    """Writes the model of a checkpoint that is in shards to a new folder; a whole one is left where it is.

    Args:
        store: The run's checkpoints.
        checkpoint: One of them.
        folder: Where to write to, which must not exist or be empty.
        shard_size: Largest file of weights, such as `5GB`.

    Returns:
        `step`, `uri`, `was_sharded`, and, where it was, `folder`, `files` with weights and their `bytes`.

    Raises:
        UserError: the folder holds something, or the size is none.
        DamagedError: the checkpoint is not what was committed.
    """
    summary = {"step": checkpoint.step, "uri": store.uri(checkpoint), "was_sharded": False}
    if f"{sharded.WEIGHTS}/{sharded.METADATA}" not in checkpoint.manifest.files:
        return summary
    if not SHARD_SIZE_FORM.fullmatch(shard_size):
        raise UserError(f"{shard_size!r} is no size of a file; expected one such as 500MB or 5GB.")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UserError(f"{folder!r} exists and is no empty folder.", remedy="Name another one with --output.")
    target = os.path.abspath(folder)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".baton-merge-", dir=os.path.dirname(target)) as scratch:
        names = [name for name in checkpoint.manifest.files if not TRAINING_FILES.match(name)]
        local = store.fetch(checkpoint, os.path.join(scratch, "checkpoint"), names=names)
        if not any(os.path.isfile(os.path.join(local, name)) for name in ("config.json", sharded.ADAPTER)):
            raise DamagedError(f"{summary['uri']} has no config.json, without which nobody can load its weights.")
        merged = os.path.join(scratch, "merged")
        files = sharded.merge(local, merged, shard_size=shard_size)
        size = sum(os.path.getsize(os.path.join(merged, name)) for name in files)
        if os.path.isdir(target):
            os.rmdir(target)
        shutil.move(merged, target)
    return summary | {"was_sharded": True, "folder": target, "files": files, "bytes": size}
