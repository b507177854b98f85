"""Checkpoints of a run: committed by manifest, found by step, verified by hashes, merged if sharded."""

import hashlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from pydantic import Field

from baton.checkpoint import seals, sharded
from baton.checkpoint.signatures import Sources, require_signed, require_signer, sign, sources_of
from baton.documents import Document, load_object
from baton.errors import DamagedError, FormatError, UserError
from baton.recipe.recipe import Recipe
from baton.runs.documents import PARTS, ForkOrigin, OwnState, RunCost, Transfer
from baton.runs.run import Run
from baton.runs.versions import CHECKPOINT_FORMATS, Fingerprint, FormatVersions
from baton.scratch import scratch_folder
from baton.signing import SIGNATURE, PublicKey, SignatureError, required, trusted_here
from baton.store import bundle
from baton.store.bundle import MAX_COPY_DEPTH, BundleWriter, CopySources
from baton.store.cache import NodeCache
from baton.store.manifest import DAMAGED, REMOVED, Manifest, read_manifest

TRAINING_FILES = re.compile(r"(^optimizer|^scheduler|^scaler|^rng_state|^baton_state|^trainer_state)")
SHARD_SIZE_FORM = re.compile(r"[1-9][0-9]*(KB|MB|GB)")
LOG_FILE = "trainer_state.json"
LogEntry = dict[str, float]  # logged values by name, `step` among them
_STEP = re.compile(r"^step-(\d{8,})$")


class Parent(Document):
    """The checkpoint that was newest when this one was made."""

    step: int
    digest: str
    manifest: str = ""  # SHA-256 of its manifest, if signed; see `signatures.manifest_digest`


class Restoration(Document):
    """The checkpoint that this one's process resumed from, step 0 at the start of a run."""

    step: int = 0
    # Part of the state → `match`, `mismatch`, `absent`, `left out` or `of other processes`.
    checked: dict[str, str] | None = None
    # `bitwise`, or `consistent` where the machine differed or state of the user's code was not restored.
    level: str = "bitwise"
    skipped: list[str] = Field(default_factory=list)  # why newer checkpoints were passed over


class CheckpointMeta(Document):
    """Origin of a checkpoint's state, its digests and its cost."""

    run: str = ""
    step: int = 0
    digest: str  # digest of the whole state in memory at the capture
    # Part of the state → its digest, and `state` → that of all parts.
    state: dict[str, str] = Field(default_factory=dict)
    parent: Parent | None = None  # None for the first checkpoint of a run
    chain: str = ""  # digest over the digests of this checkpoint and all earlier ones
    restored: Restoration = Restoration()
    identity: str = ""  # digest of recipe, data, model, code and plan, see `run.state_identity`
    finished: bool = False  # whether early stopping or the budget ended the run here
    end: tuple[int, int] | None = None  # span of the `RunEnd` that it was trained under
    fingerprint: Fingerprint = Fingerprint()
    trainable_parameters: int = 0
    chunk: int = 0
    created: str = ""
    seconds: dict[str, float] = Field(default_factory=dict)  # seconds of the process that made it, by phase
    moved: Transfer = Transfer()
    work: RunCost = RunCost()
    forked_from: ForkOrigin | None = None
    # Steps up to this one that were skipped, also in its parent's run; see `training.guard`.
    skips: list[int] = Field(default_factory=list)
    hooks: OwnState | None = None  # state of the user's code; None in checkpoints of a Baton that did not look for it
    seal: str = ""  # SHA-256 of the run's newest seal when its chunk began, if signed; see `seals`
    sources: Sources | None = None  # digests of its sources, if signed outside of a stage, or by an older Baton
    made: FormatVersions = FormatVersions()


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of the state at a step's end."""

    step: int
    manifest: Manifest
    meta: CheckpointMeta

    @property
    def digest(self) -> str:
        return self.meta.digest

    @property
    def bytes(self) -> int:
        return self.manifest.bytes

    def require_continued(self, *names: str) -> None:
        """Raises `FormatError` if this Baton does not continue one of the named formats, by default all of them."""
        what = f"the checkpoint of step {self.step} of run {self.meta.run!r}"
        self.meta.made.require_continued(what, names or CHECKPOINT_FORMATS)


class CheckpointStore:
    """The checkpoints of one run, `runs/<run>/checkpoints/step-NNNNNNNN/`.

    `signed_by` is the key that must have signed them and signs new ones; by default the process's own, if it has one.
    """

    def __init__(self, run: Run, signed_by: PublicKey | None = None) -> None:
        self.run = run
        self.storage = run.storage
        self.signed_by = signed_by or trusted_here()
        # Span of the run's end by its budget, where training asks: checkpoints of another are withdrawn on sight.
        self.end: tuple[int, int] | None = None
        self.withdraws = False

    @classmethod
    def of(cls, run: Run, recipe: Recipe) -> Self:
        """Returns a run's checkpoints, signed if the recipe asks for that; see `signing.required`."""
        signing = recipe.chunks.signing
        return cls(run, required(signing.public_key, f"run {run.name!r}") if signing else None)

    def prefix(self, step: int) -> str:
        return self.run.path(f"checkpoints/step-{step:08d}")

    def uri(self, checkpoint: Checkpoint) -> str:
        """Returns the folder that `from_pretrained` and `resume_from_checkpoint` read."""
        return self.storage.uri(checkpoint.manifest.path(self.prefix(checkpoint.step)))

    def steps(self) -> list[int]:
        """Returns the steps with any object, ascending; not all are committed."""
        names = self.storage.list(self.run.path("checkpoints"))
        return sorted(int(match[1]) for name in names if (match := _STEP.match(name)))

    def read(self, step: int, names: Sequence[str] | None = None) -> Checkpoint | None:
        """Returns the committed checkpoint of a step, or None; `names` is a listing of the step's folder, if made.

        `DamagedError` if the manifest is unreadable, marked or misplaced; `FormatError` if a newer Baton wrote it.
        """
        manifest = read_manifest(self.storage, self.prefix(step), names)
        return self._checked(step, manifest) if manifest else None

    def committed(
        self, on_damaged: Callable[[int, DamagedError], None] | None = None, *, after: int = 0
    ) -> Iterator[Checkpoint]:
        """Yields committed checkpoints after a step, newest first; calls `on_damaged` for each damaged manifest."""
        # One listing; manifests are read one by one, so that a search for the newest reads only one.
        for step in reversed(self.steps()):
            if step <= after:
                return
            try:
                checkpoint = self.read(step)
            except DamagedError as error:
                if on_damaged:
                    on_damaged(step, error)
                continue
            if checkpoint and self.withdraws and self._is_voided(checkpoint):
                # Marked as retention does: absent for all readers, and its step can be committed again.
                self.storage.write(f"{self.prefix(step)}/{REMOVED}{checkpoint.manifest.folder}", b"")
            elif checkpoint:
                yield checkpoint

    def _is_voided(self, checkpoint: Checkpoint) -> bool:
        """Tells whether a checkpoint's steps differ from those that lead to the run's end."""
        theirs = checkpoint.meta.end
        return theirs != self.end and checkpoint.step > min(span[0] for span in (theirs, self.end) if span)

    def committed_steps(self) -> list[int]:
        return sorted(checkpoint.step for checkpoint in self.committed())

    def newest(self) -> Checkpoint | None:
        return next(self.committed(), None)

    def whole(self) -> Iterator[Checkpoint]:
        """Yields the committed checkpoints that `is_whole`, newest first."""
        return (checkpoint for checkpoint in self.committed() if self.is_whole(checkpoint))

    def is_whole(self, checkpoint: Checkpoint) -> bool:
        """Tells, by one listing, whether all files of a checkpoint are there in full size."""
        return bundle.is_whole(self.storage, self.prefix(checkpoint.step), checkpoint.manifest)

    def open_writer(self, step: int, check: Callable[[], None] = lambda: None) -> BundleWriter:
        return BundleWriter(
            self.storage,
            self.prefix(step),
            kind="checkpoint",
            check=check,
            find_copy_sources=partial(self.ancestors, step),
            fits=partial(self._fits, step),
        )

    def ancestors(self, step: int) -> CopySources:
        """Returns the newest checkpoints before a step, from which its own unchanged files may be copied."""
        found: list[tuple[str, Manifest]] = []
        for number in reversed(self.steps()):
            names = self.storage.list(self.prefix(number))
            try:
                checkpoint = self.read(number, names)
            except (DamagedError, FormatError):
                break
            if checkpoint and number < step:
                found.append((self.prefix(number), checkpoint.manifest))
            # Damage found here may also be in older ones, as files are copied from step to step. That holds for this
            # very step, too: it is rebuilt.
            if len(found) == MAX_COPY_DEPTH or any(name.startswith(DAMAGED) for name in names):
                break
        return CopySources(found)

    def commit(self, step: int, writer: BundleWriter, meta: CheckpointMeta) -> tuple[Checkpoint, bool]:
        # Run and step override those in `meta`: by them `_checked` detects a folder copied from elsewhere.
        stated: dict[str, Any] = {**meta.to_json(), "run": self.run.name, "step": step}
        if self.signed_by:
            for inherited in ("seal", "sources", SIGNATURE):  # a fork's first checkpoint comes with its parent's
                stated.pop(inherited, None)
            ledger = seals.ledger_of(self.run)
            head = ledger.head if ledger else None
            stated |= {"seal": head.digest} if head else {"sources": sources_of(self.run).to_json()}
            # Inside the manifest, the last object written: no crash can make a committed checkpoint unsigned.
            stated[SIGNATURE] = sign(writer.manifest(stated), self.signed_by)
        manifest, ours = writer.commit(stated)
        return self._checked(step, manifest), ours

    def require_signer(self) -> None:
        """Raises `UserError` if signatures are required and this process cannot sign."""
        if self.signed_by:
            require_signer(self.signed_by)

    def fetch(
        self, checkpoint: Checkpoint, local_dir: str, cache: NodeCache | None = None, names: Iterable[str] | None = None
    ) -> str:
        """Downloads a checkpoint, every byte checked; `SignatureError` if it has an unsigned file."""
        prefix, manifest = self.prefix(checkpoint.step), checkpoint.manifest
        # An unsigned file is not downloaded here, but read by whoever reads the folder itself.
        if self.signed_by and (unlisted := self.storage.find(manifest.path(prefix)).keys() - manifest.files.keys()):
            raise SignatureError(
                f"{self.uri(checkpoint)} is refused: {', '.join(sorted(unlisted))} was not signed.",
                remedy="Find out who put it there, and remove it.",
            )
        return bundle.fetch(self.storage, prefix, manifest, local_dir, cache, names)

    def verify(self, checkpoint: Checkpoint) -> list[str]:
        return bundle.verify(self.storage, self.prefix(checkpoint.step), checkpoint.manifest)

    def require_whole(self, checkpoint: Checkpoint, problems: list[str]) -> None:
        bundle.require_whole(self.storage, self.prefix(checkpoint.step), checkpoint.manifest, problems)

    def code(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the problems of `sharded.code_in` for a checkpoint in the store."""
        manifest, prefix = checkpoint.manifest, self.prefix(checkpoint.step)
        with scratch_folder("pickles") as folder:
            for name in manifest.files:
                if sharded.may_be_pickle(name):
                    self.storage.download(manifest.path(prefix, name), os.path.join(folder, name))
            return sharded.code_in(folder)

    def history(self, checkpoint: Checkpoint) -> list[LogEntry]:
        """Returns the run's logged values up to a checkpoint; `DamagedError` if its `trainer_state.json` has none."""
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
        """Returns the run's finite evaluation losses up to a checkpoint, by step."""
        return evaluation_losses(self.history(checkpoint))

    def _fits(self, step: int, manifest: Manifest) -> bool:
        try:
            return bool(self._checked(step, manifest))
        except DamagedError:
            return False

    def _checked(self, step: int, manifest: Manifest) -> Checkpoint:
        """Returns a manifest's checkpoint, which must be of this run and step, and signed if required."""
        where = self.storage.uri(self.prefix(step))
        # An unsigned one is an error and never passed over: else whoever can write to the store would decide from which
        # older checkpoint the run goes on.
        if self.signed_by:
            require_signed(manifest, self.signed_by, f"the checkpoint of step {step} in {where}")
        stated = (manifest.kind, manifest.meta.get("run"), manifest.meta.get("step"))
        if stated != ("checkpoint", self.run.name, step):
            # A signed manifest in the wrong place was put there on purpose.
            kind = SignatureError if self.signed_by else DamagedError
            raise kind(f"{where}: its manifest names {stated}, not this run's.")
        return self.as_checkpoint(step, manifest)

    def as_checkpoint(self, step: int, manifest: Manifest) -> Checkpoint:
        """Returns a manifest's checkpoint; `DamagedError` if it is of none, `FormatError` if a newer Baton wrote it."""
        if not manifest.files:
            raise DamagedError(f"{self.storage.uri(self.prefix(step))}: its manifest names no files.")
        meta = CheckpointMeta.read(manifest.meta, self.storage.uri(self.prefix(step)))
        # An error for every reader: passed over as damaged, it would be written again, and retention would take others.
        meta.made.require_known(f"the checkpoint of step {step} of run {self.run.name!r}")
        if meta.state.keys() >= {*PARTS, "state"} and not combined(meta.state) == meta.state["state"] == meta.digest:
            raise DamagedError(f"{self.storage.uri(self.prefix(step))}: its digest is not that of the state's parts.")
        return Checkpoint(step, manifest, meta)


def chained(parent: Checkpoint | None, digest: str) -> str:
    """Returns the digest over a state's digest and those of all earlier checkpoints."""
    return hashlib.sha256(f"{parent.meta.chain if parent else ''}{digest}".encode()).hexdigest()


def combined(parts: Mapping[str, str]) -> str:
    """Returns the digest of the whole state from those of its parts."""
    # By name and in a fixed order, whatever the order of `parts`.
    return hashlib.sha256("".join(f"{name}={parts[name]};" for name in PARTS).encode()).hexdigest()


def evaluation_losses(history: Iterable[LogEntry]) -> dict[int, float]:
    """Returns the finite evaluation losses by step."""
    losses = {int(entry["step"]): entry["eval_loss"] for entry in history if "eval_loss" in entry}
    return {step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)}


def merge_model(store: CheckpointStore, checkpoint: Checkpoint, folder: str, shard_size: str) -> dict[str, Any]:
    """Writes a sharded checkpoint's model to a new or empty folder; does nothing for a whole one.

    Returns `step`, `uri`, `was_sharded`, and, if so, `folder`, `files` with weights and their `bytes`.
    """
    summary = {"step": checkpoint.step, "uri": store.uri(checkpoint), "was_sharded": False}
    if f"{sharded.WEIGHTS}/{sharded.METADATA}" not in checkpoint.manifest.files:
        return summary
    if not SHARD_SIZE_FORM.fullmatch(shard_size):
        raise UserError(f"{shard_size!r} is not a file size; expected one such as 500MB or 5GB.")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UserError(f"{folder!r} exists and is not an empty folder.", remedy="Name another one with --output.")
    target = os.path.abspath(folder)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    # Next to the target, and moved there whole: never half a model under its name.
    with tempfile.TemporaryDirectory(prefix=".baton-merge-", dir=os.path.dirname(target)) as scratch:
        names = [name for name in checkpoint.manifest.files if not TRAINING_FILES.match(name)]
        local = store.fetch(checkpoint, f"{scratch}/checkpoint", names=names)
        if not any(os.path.isfile(os.path.join(local, name)) for name in ("config.json", sharded.ADAPTER)):
            raise DamagedError(f"{summary['uri']} has no config.json, which its weights need to load.")
        merged = f"{scratch}/merged"
        files = sharded.merge(local, merged, shard_size=shard_size)
        size = sum(os.path.getsize(os.path.join(merged, name)) for name in files)
        if os.path.isdir(target):
            os.rmdir(target)
        shutil.move(merged, target)
    return summary | {"was_sharded": True, "folder": target, "files": files, "bytes": size}
