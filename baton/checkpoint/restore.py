"""Which checkpoint a chunk resumes from: the newest whose every byte is as committed, and that holds no code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton import events
from baton.checkpoint.sharded import code_in
from baton.checkpoint.signatures import require_same_sources
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore
from baton.errors import DamagedError, ExactnessError
from baton.runs.documents import ProofPart
from baton.store import bundle
from baton.store.cache import NodeCache

logger = logging.getLogger("baton")

TRIES = 5
"""Times a look for the newest checkpoint begins again after retention has taken what it had seen."""


@dataclass(frozen=True)
class FetchedCheckpoint:
    """A checkpoint downloaded to this machine.

    Attributes:
        checkpoint: What was committed.
        folder: Local folder of its files.
        is_target: Whether nothing is to be trained after it in this chunk, which lacks its score alone.
        left_out: Parts of the state that a negative control has taken out of the folder.
    """

    checkpoint: Checkpoint
    folder: str
    is_target: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Its step."""
        return self.checkpoint.step

    @property
    def meta(self) -> CheckpointMeta:
        """Whose state it is."""
        return self.checkpoint.meta


def committed_at_target(store: CheckpointStore, target: int) -> Checkpoint | None:
    """Returns a committed checkpoint at the target or after it, or one that ended the run, if its files are there."""
    for checkpoint in store.committed():
        # They come newest first: nothing before this one is nearer to the target.
        if not _is_final(checkpoint, target):
            return None
        if store.is_whole(checkpoint):
            return checkpoint
    return None


def usable_at_target(store: CheckpointStore, target: int) -> Checkpoint | None:
    """Returns what `committed_at_target` does, but for damaged ones, which are marked so that they are made anew.

    Bytes are read only where no proof says that they have been.
    """
    for checkpoint in store.committed():
        if not _is_final(checkpoint, target):
            return None
        try:
            require_usable(store, checkpoint)
        except DamagedError as error:
            _report_skipped(checkpoint.step, error)
        else:
            return checkpoint
    return None


def require_usable(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Checks a checkpoint that will not be loaded: its sizes always, its bytes where nobody has read them back.

    Raises:
        RewritableDamageError: it is not what was committed.
    """
    problems = bundle.torn_files(store.storage, store.prefix(checkpoint.step), checkpoint.manifest)
    # One listing where the checkpoint stage has read the bytes; a run that is complete is looked through in seconds.
    if not problems and not is_proven(store, checkpoint):
        problems = store.verify(checkpoint)
    store.require_whole(checkpoint, problems)


def is_proven(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    """Tells whether the checkpoint stage has read these very files back."""
    part = store.run.read(ProofPart, checkpoint.meta.chunk)
    # The address has the attempt in it: the proof of files that were since replaced says nothing of these.
    return part is not None and part.uri == store.uri(checkpoint)


def _is_final(checkpoint: Checkpoint, target: int) -> bool:
    """Tells whether a checkpoint is at the target or after it, or has ended the run."""
    return checkpoint.step >= target or checkpoint.meta.finished


class Restorer:
    """Finds and downloads the checkpoint of an identity to resume from, for a target.

    `cache` has the files that this node has already; `place` returns a folder for a checkpoint's files.
    """

    def __init__(
        self,
        store: CheckpointStore,
        target: int,
        identity: str,
        cache: NodeCache | None,
        place: Callable[[Checkpoint], str],
    ) -> None:
        self._store, self._target, self._identity = store, target, identity
        self._cache, self._place = cache, place
        self._skipped: dict[int, str] = {}
        self._unfit: set[str] = set()

    @property
    def skipped(self) -> list[str]:
        """Why newer checkpoints were passed over."""
        return list(self._skipped.values())

    def fetch(self, *, to_score: bool = False) -> FetchedCheckpoint | None:
        """Downloads the newest checkpoint before the target that is as committed, None where there is none.

        Args:
            to_score: Whether one at the target or after it will do, too.

        Raises:
            ExactnessError: a checkpoint was made from something else.
            FormatError: it was made with what this Baton does not continue.
            SignatureError: it must be signed, and is not; or tokens are not those that it was signed with.
        """
        restored = None
        for _ in range(TRIES):
            restored = self._fetch_newest(to_score=to_score)
            # A process beside this one, thought gone, may have committed newer ones and let retention take those that
            # this one had listed: without another look the run would begin anew.
            if not self._is_newer_there(restored.step if restored else 0, to_score=to_score):
                break
        return restored

    def _is_newer_there(self, than: int, *, to_score: bool) -> bool:
        return any(
            (to_score or checkpoint.step < self._target) and checkpoint.manifest.folder not in self._unfit
            for checkpoint in self._store.committed(after=than)
        )

    def _fetch_newest(self, *, to_score: bool) -> FetchedCheckpoint | None:
        def on_damaged(step: int, error: DamagedError) -> None:
            if to_score or step < self._target:
                self._skip(step, error)

        for checkpoint in self._store.committed(on_damaged):
            if checkpoint.step >= self._target and not to_score:
                continue
            # Before a byte is downloaded: another recipe's is an error, not damage, and so is another Baton's.
            checkpoint.require_continued()
            if checkpoint.meta.identity != self._identity:
                raise ExactnessError(
                    f"the checkpoint of step {checkpoint.step} was made from another recipe, data, model or plan.",
                    remedy="Start a run under another name.",
                )
            if self._store.signed_by:
                require_same_sources(self._store.run, checkpoint.meta.sources, checkpoint.step)
            try:
                folder = self._store.fetch(checkpoint, self._place(checkpoint), self._cache)
            except DamagedError as error:
                self._unfit.add(checkpoint.manifest.folder)
                self._skip(checkpoint.step, error)
                continue
            return FetchedCheckpoint(checkpoint, folder, is_target=to_score and _is_final(checkpoint, self._target))
        return None

    def require_no_code(self, restored: FetchedCheckpoint | None) -> FetchedCheckpoint | None:
        """Returns what was fetched, or the newest checkpoint before it whose pickles hold nothing but data."""
        while restored:
            problems = code_in(restored.folder)
            if not problems:
                return restored
            try:
                self._store.require_whole(restored.checkpoint, problems)  # marks it, so that `fetch` passes it over
            except DamagedError as error:
                self._skip(restored.step, error)
            # The pickle's code never ran: `code_in` reads what it would call, and calls nothing.
            restored = self.fetch()
        return None

    def _skip(self, step: int, error: DamagedError) -> None:
        _report_skipped(step, error)
        self._skipped.setdefault(step, str(error))


def _report_skipped(step: int, error: DamagedError) -> None:
    logger.warning("checkpoint of step %d is not used: %s", step, error)
    events.emit(events.Skipped(step=step, reason=str(error)))
