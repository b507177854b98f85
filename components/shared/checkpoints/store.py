"""Checkpoints of a run: committed by manifest, found by step, never trusted without their hashes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.components.shared.checkpoints import logs
from baton.components.shared.checkpoints.meta import CheckpointMeta
from baton.components.shared.checkpoints.pickles import code_in, may_be_pickle
from baton.components.shared.checkpoints.signatures import (
    require_no_strangers,
    require_signed,
    require_signer,
    signed_meta,
)
from baton.components.shared.core.errors import DamagedError, FormatError
from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.core.signing import PublicKey, SignatureError, required, trusted_here
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.training import Promoted, ProofPart
from baton.components.shared.runs.formats import OF_CHECKPOINT
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles
from baton.components.shared.store.ancestors import DEPTH, Ancestors
from baton.components.shared.store.bundles import BundleWriter, Manifest
from baton.components.shared.store.cache import NodeCache

_STEP = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        step: The step at whose end it was captured.
        manifest: Its files.
        meta: Whose state it is.
    """

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
        """Checks that this Baton continues what it was written with.

        Args:
            names: The formats that matter, see `formats.FORMATS`; all of a checkpoint's when left out.

        Raises:
            FormatError: it does not.
        """
        what = f"the checkpoint of step {self.step} of run {self.meta.run!r}"
        self.meta.made.require_continued(what, names or OF_CHECKPOINT)


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
        manifest = bundles.read_manifest(self.storage, self.prefix(step), names)
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
        return bundles.is_whole(self.storage, self.prefix(checkpoint.step), checkpoint.manifest)

    def open_writer(self, step: int, check: Callable[[], None] = lambda: None) -> BundleWriter:
        """Begins an attempt at a checkpoint; see `bundles.BundleWriter`."""
        look = partial(self.ancestors, step)
        return BundleWriter(self.storage, self.prefix(step), kind="checkpoint", check=check, look=look)

    def ancestors(self, step: int) -> Ancestors:
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
            if len(found) == DEPTH or any(name.startswith(bundles.DAMAGED) for name in names):
                break
        return Ancestors(found)

    def commit(self, step: int, writer: BundleWriter, meta: CheckpointMeta) -> tuple[Checkpoint, bool]:
        """Commits what was sent; see `bundles.BundleWriter.commit`."""
        # Run and step last: `_checked` compares them, and a folder copied from elsewhere is found out by them.
        stated: dict[str, Any] = {**meta.to_json(), "run": self.run.name, "step": step}
        if self.signed_by:
            stated = signed_meta(self.run, stated, writer.manifest, self.signed_by)
        manifest, ours = writer.commit(stated)
        return self._checked(step, manifest), ours

    def require_signer(self) -> None:
        """Checks that this process can sign, where signatures are asked for; see `signatures.require_signer`."""
        if self.signed_by:
            require_signer(self.signed_by)

    def fetch(
        self, checkpoint: Checkpoint, local_dir: str, cache: NodeCache | None = None, names: Iterable[str] | None = None
    ) -> str:
        """Downloads a checkpoint, every byte checked; see `bundles.fetch`."""
        prefix = self.prefix(checkpoint.step)
        if self.signed_by:
            require_no_strangers(self.strangers(checkpoint), self.uri(checkpoint))
        return bundles.fetch(self.storage, prefix, checkpoint.manifest, local_dir, cache, names)

    def strangers(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the files in a checkpoint's folder that its manifest does not name."""
        present = self.storage.find(checkpoint.manifest.path(self.prefix(checkpoint.step)))
        return sorted(present.keys() - checkpoint.manifest.files.keys())

    def verify(self, checkpoint: Checkpoint) -> list[str]:
        """Reads a checkpoint back; see `bundles.verify`."""
        return bundles.verify(self.storage, self.prefix(checkpoint.step), checkpoint.manifest)

    def require_whole(self, checkpoint: Checkpoint, problems: list[str]) -> None:
        """Marks a checkpoint in which problems were found; see `bundles.require_whole`."""
        bundles.require_whole(self.storage, self.prefix(checkpoint.step), checkpoint.manifest, problems)

    def require_usable(self, checkpoint: Checkpoint) -> None:
        """Checks a checkpoint that will not be loaded: its sizes always, its bytes where nobody has read them back.

        Raises:
            MarkedError: it is not what was committed.
        """
        prefix, manifest = self.prefix(checkpoint.step), checkpoint.manifest
        problems = bundles.torn_files(self.storage, prefix, manifest)
        # One listing where the checkpoint stage has read the bytes; a run that is complete is looked through in
        # seconds.
        if not problems and not self.is_proven(checkpoint):
            problems = self.verify(checkpoint)
        self.require_whole(checkpoint, problems)

    def is_proven(self, checkpoint: Checkpoint) -> bool:
        """Tells whether the checkpoint stage has read these very files back."""
        part = self.run.read(ProofPart, checkpoint.meta.chunk)
        # The address has the attempt in it: the proof of files that were since replaced says nothing of these.
        return part is not None and part.uri == self.uri(checkpoint)

    def code(self, checkpoint: Checkpoint) -> list[str]:
        """Returns a line for each pickle of a whole checkpoint that holds code; see `pickles.code_in`."""
        manifest, prefix = checkpoint.manifest, self.prefix(checkpoint.step)
        with scratch_folder("pickles") as folder:
            for name in manifest.files:
                if may_be_pickle(name):
                    self.storage.download(manifest.path(prefix, name), os.path.join(folder, name))
            return code_in(folder)

    def history(self, checkpoint: Checkpoint) -> list[logs.LogEntry]:
        """Returns the logged values of the run up to a checkpoint, from its `trainer_state.json`.

        Raises:
            DamagedError: it holds none.
        """
        path = checkpoint.manifest.path(self.prefix(checkpoint.step), logs.FILE)
        if logs.FILE not in checkpoint.manifest.files:
            raise DamagedError(f"{self.storage.uri(path)} is not there, and its manifest does not name it.")
        return logs.parsed(self.storage.read(path), self.storage.uri(path))

    def evaluation_losses(self, checkpoint: Checkpoint) -> dict[int, float]:
        """Returns the evaluation losses of the run up to a checkpoint that are numbers, by step."""
        return logs.evaluation_losses(self.history(checkpoint))

    def proven_chunks(self) -> set[int]:
        """Returns the numbers of the chunks whose checkpoint the checkpoint stage has read back."""
        names = self.storage.list(self.run.path("proof"))
        return {int(match[1]) for name in names if (match := re.fullmatch(r"chunk-(\d+)\.json", name))}

    def verified_step(self) -> int:
        """Returns the newest step that the checkpoint stage has read back and found whole, 0 before there is one."""
        promoted, proven = self.run.read(Promoted), self.proven_chunks()
        # Of two checkpoint stages at once the slower may write the older step last. Each has its own part of the proof.
        part = self.run.read(ProofPart, max(proven)) if proven else None
        return max(promoted.newest.step if promoted else 0, part.step if part else 0)

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
