"""The chain of states that a chunk continues: what the manifests of its checkpoints say besides their files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from baton.components.shared.checkpoints.meta import CheckpointMeta, Parent, Restoration
from baton.components.shared.checkpoints.signatures import manifest_digest
from baton.components.shared.checkpoints.store import Checkpoint
from baton.components.shared.core.fingerprint import Fingerprint
from baton.components.shared.runs.documents.training import OwnState, Transfer, Work
from baton.components.shared.runs.formats import OF_CHECKPOINT, Made
from baton.components.shared.runs.run import now
from baton.components.train_chunk.checkpointing.restore import Restored
from baton.components.train_chunk.context import TrainContext


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A checkpoint as the trainer has written it.

    Attributes:
        step: The step at whose end it was captured.
        folder: Local folder with its files.
        digests: Digests of the state in memory, those of all ranks joined.
        wanted: Whether it is not given up for a newer one.
        finished: Whether early stopping ends the run here.
        checked: What was compared after the restore, part by part.
        trainable_parameters: How many parameters training changes.
        skips: Steps up to it that were skipped.
        hooks: State of the user's code.
    """

    step: int
    folder: str
    digests: dict[str, str]
    wanted: bool
    finished: bool
    checked: dict[str, str]
    trainable_parameters: int
    skips: tuple[int, ...] = ()
    hooks: OwnState = field(default_factory=OwnState)


class Lineage:
    """The checkpoints that those of a chunk come after.

    Args:
        context: The chunk.
        restored: The checkpoint it resumes from.
        level: How exactly; see `compatibility.adapt`.
        skipped: Why newer checkpoints were passed over.

    Attributes:
        start_step: Step at which the chunk began.
        parent: The newest checkpoint of this run that this process restored or committed.
    """

    def __init__(self, context: TrainContext, restored: Restored | None, level: str, skipped: list[str]) -> None:
        self._context = context
        self._level, self._skipped = level, skipped
        self._looked = restored is None or restored.meta.hooks is not None
        parallel = context.recipe.parallel
        self._fingerprint = Fingerprint.here(context.ranks.size, parallel.strategy, parallel.virtual_workers)
        self.start_step = restored.step if restored else 0
        self.parent: Checkpoint | None = restored.checkpoint if restored else None

    @property
    def reached(self) -> int:
        """The step of the newest checkpoint."""
        return self.parent.step if self.parent else 0

    def meta(self, capture: Capture, work: Work) -> CheckpointMeta:
        """Returns what the manifest of a checkpoint says besides its files."""
        # Read as the commit is made, and not at the capture: only then is it known which checkpoint was committed
        # before this one.
        parent, context = self.parent, self._context
        digest = capture.digests["state"]
        storage = context.run.storage
        # An older Baton's checkpoint lacks what changes here: whether it had changed before, nobody knows.
        unknown = not self._looked and (capture.hooks.carried or capture.hooks.lost)
        meta = CheckpointMeta(
            digest=digest,
            state=capture.digests,
            parent=self._as_parent(parent) if parent else None,
            chain=hashlib.sha256(f"{parent.meta.chain if parent else ''}{digest}".encode()).hexdigest(),
            restored=Restoration(
                step=self.start_step,
                checked=capture.checked or None,
                level="consistent" if unknown else self._level,
                skipped=self._skipped,
            ),
            identity=context.identity,
            finished=capture.finished,
            fingerprint=self._fingerprint,
            trainable_parameters=capture.trainable_parameters,
            hooks=capture.hooks,
            chunk=context.index,
            created=now(),
            seconds=context.clock.split(),
            moved=Transfer(sent=storage.sent, received=storage.received),
            work=work,
            made=Made.here(OF_CHECKPOINT),
        )
        return meta.model_copy(update={"skips": list(capture.skips)}) if capture.skips else meta

    def _as_parent(self, parent: Checkpoint) -> Parent:
        """Returns what a checkpoint knows its parent by: where they are signed, by all that its manifest says."""
        known = Parent(step=parent.step, digest=parent.digest)
        if self._context.store.signed_by is None:
            return known
        return known.model_copy(update={"manifest": manifest_digest(parent.manifest)})
