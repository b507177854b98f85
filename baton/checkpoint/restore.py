"""Selection of the checkpoint to resume from: the newest with every byte as committed and no code in it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton import events
from baton.checkpoint import seals
from baton.checkpoint.sharded import code_in
from baton.checkpoint.signatures import require_same_sources
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore
from baton.errors import DamagedError, ExactnessError
from baton.runs.documents import ProofPart
from baton.store import bundle
from baton.store.cache import NodeCache

logger = logging.getLogger("baton")

TRIES = 5  # searches for the newest checkpoint, repeated while retention removes listed ones


@dataclass(frozen=True)
class FetchedCheckpoint:
    """A checkpoint downloaded to this machine."""

    checkpoint: Checkpoint
    folder: str
    is_target: bool = False  # nothing left to train in this chunk, which lacks only its score
    left_out: tuple[str, ...] = ()  # parts of the state that a negative control has removed from the folder

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def meta(self) -> CheckpointMeta:
        return self.checkpoint.meta


def committed_at_target(store: CheckpointStore, target: int) -> Checkpoint | None:
    """Returns a whole checkpoint at the target or after it, or one that ended the run."""
    for checkpoint in store.committed():
        # Newest first: every further one is farther from the target.
        if not _is_final(checkpoint, target):
            return None
        if store.is_whole(checkpoint):
            return checkpoint
    return None


def usable_at_target(store: CheckpointStore, target: int, *, is_last: bool = False) -> Checkpoint | None:
    """Returns what `committed_at_target` does, passing over damaged ones and marking them to be rebuilt."""
    for checkpoint in store.committed():
        if not _is_final(checkpoint, target):
            return None
        try:
            require_usable(store, checkpoint, is_last=is_last)
        except DamagedError as error:
            _report_skipped(checkpoint.step, error)
        else:
            return checkpoint
    return None


def require_usable(store: CheckpointStore, checkpoint: Checkpoint, *, is_last: bool = False) -> None:
    """Checks a checkpoint that will not be loaded; `RewritableDamageError` if it differs from its commit.

    `is_last`: no later chunk of the run makes up for damaged bytes, so they are read back again.
    """
    problems = bundle.torn_files(store.storage, store.prefix(checkpoint.step), checkpoint.manifest)
    # One listing if the checkpoint stage has read the bytes back: a complete run is checked in seconds.
    if not problems and (is_last or not is_proven(store, checkpoint)):
        problems = store.verify(checkpoint)
    store.require_whole(checkpoint, problems)


def is_proven(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    """Tells whether the checkpoint stage has read these very files back."""
    part = store.run.read(ProofPart, checkpoint.meta.chunk)
    # The URI contains the attempt: a proof of files that were replaced since does not count for these.
    return part is not None and part.uri == store.uri(checkpoint)


def _is_final(checkpoint: Checkpoint, target: int) -> bool:
    return checkpoint.step >= target or checkpoint.meta.finished


class Restorer:
    """Finds and downloads the checkpoint to resume from; `place` returns a folder for its files."""

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
        """Downloads the newest undamaged checkpoint before the target; with `to_score` also one at or after it.

        Raises:
            ExactnessError: a checkpoint was made from another recipe, data, model or plan.
            FormatError: this Baton does not continue a format that it was written with.
            SignatureError: a required signature is missing, or the run's sources differ from the signed ones.
        """
        restored = None
        for _ in range(TRIES):
            restored = self._fetch_newest(to_score=to_score)
            # A process that was thought gone may have committed newer ones since the listing, and its retention taken
            # the listed ones: without another look the run would start over.
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
            # Before the download, and errors rather than damage: to pass over another recipe's or Baton's checkpoint
            # would be to train its steps again from other bits.
            checkpoint.require_continued()
            if checkpoint.meta.identity != self._identity:
                raise ExactnessError(
                    f"the checkpoint of step {checkpoint.step} was made from another recipe, data, model or plan.",
                    remedy="Start a run under another name.",
                )
            ledger = seals.ledger_of(self._store.run)
            if self._store.signed_by and not (ledger and ledger.head):  # else all sources were compared with the seals
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
        """Returns the fetched checkpoint, or an older one, whose pickles hold only data."""
        while restored:
            problems = code_in(restored.folder)
            if not problems:
                return restored
            try:
                self._store.require_whole(restored.checkpoint, problems)  # marks it: `fetch` then passes it over
            except DamagedError as error:
                self._skip(restored.step, error)
            # The pickle's code never ran: `code_in` only reads the names that it would call.
            restored = self.fetch()
        return None

    def _skip(self, step: int, error: DamagedError) -> None:
        _report_skipped(step, error)
        self._skipped.setdefault(step, str(error))


def _report_skipped(step: int, error: DamagedError) -> None:
    logger.warning("checkpoint of step %d is not used: %s", step, error)
    events.emit(events.Skipped(step=step, reason=str(error)))
