"""Checkpoints on their way to the store, beside training: one at a time; a newer one takes the place of every other."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton import events
from baton.checkpoint.manifest import CheckpointMeta
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError, ExactnessError, UnavailableError
from baton.runs.documents import StagePhase
from baton.runtime import RetryAttempt, Work, backoff, retry
from baton.store.bundle import BundleWriter

logger = logging.getLogger("baton")

PAUSE = 2.0
"""Seconds between two tries while the store takes nothing."""


class Superseded(BatonError):  # noqa: N818
    """A newer checkpoint takes this one's place."""


@dataclass
class PendingCheckpoint:
    """A checkpoint staged on this machine.

    Attributes:
        step: The step at whose end it was captured.
        folder: Local folder with its files.
        digests: Digests of the state in memory when it was captured.
        meta: Returns what the manifest says besides; called once the files are in the store.
        writer: Holds what has been sent of it already, where there was no room for all of it.
        wanted: Whether no newer one may take its place.
    """

    step: int
    folder: str
    digests: dict[str, str]
    meta: Callable[[], CheckpointMeta]
    writer: BundleWriter | None = None
    wanted: bool = False
    superseded: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises `Superseded` once it is."""
        if self.superseded.is_set():
            raise Superseded(f"a newer checkpoint takes the place of step {self.step}'s.")


Committed = Callable[[PendingCheckpoint, Checkpoint, bool, dict[str, float]], None]
"""Is called with a snapshot, the checkpoint that is committed, whether it is this process's, and the seconds that
upload and commit took."""


class Committer:
    """Uploads and commits snapshots in its own thread.

    Args:
        store: The run's checkpoints.
        committed: Called in that thread.
        max_unsaved: Seconds for which the store may take nothing before the chunk fails.
    """

    def __init__(self, store: CheckpointStore, committed: Committed, *, max_unsaved: float) -> None:
        self._store = store
        self._max_unsaved = max_unsaved
        self._committed = committed
        self._runtime = store.storage.runtime
        self._thread: Work | None = None
        self._snapshot: PendingCheckpoint | None = None
        self._failure: BaseException | None = None
        self._is_failing = self._made_way = False
        self._saved_at = self._runtime.monotonic()

    @property
    def is_free(self) -> bool:
        """Whether a snapshot taken now would be sent at once: none is on its way, or it does not get through."""
        return self._thread is None or not self._thread.is_alive() or self._is_failing

    def submit(self, snapshot: PendingCheckpoint) -> None:
        """Sends a snapshot on its way and returns at once; `make_way` comes before."""
        # An older one that still hangs in a request has its own event, and can fail no more: see `make_way`.
        self._snapshot, self._is_failing = snapshot, False
        self._thread = self._runtime.begin(partial(self._work, snapshot), "baton-commit")

    def make_way(self) -> None:
        """Ends what is on its way, for a newer snapshot; waits for it where it must be kept and gets through.

        It must be kept if the one before made way for it: uploads that take longer than what lies between checkpoints
        would all be given up.
        """
        made_way, self._made_way = self._made_way, False
        if not (self._thread and self._thread.is_alive() and self._snapshot):
            return
        if self._is_failing:  # it may hang in a request for a while yet: it ends by itself, and nothing waits for it
            self._snapshot.superseded.set()
            shutil.rmtree(self._snapshot.folder, ignore_errors=True)
            return
        if not (self._snapshot.wanted or made_way):
            self._snapshot.superseded.set()
            self._made_way = True
        self._thread.join()

    def finish(self) -> None:
        """Waits until the last snapshot is committed.

        Raises:
            BatonError: it cannot be.
        """
        if self._thread:
            self._thread.join()
        self.raise_failure()

    def abandon(self, seconds: float) -> None:
        """Gives what is on its way some time to arrive, when training has failed and little else can be saved."""
        if self._thread:
            self._thread.join(seconds)

    def raise_failure(self) -> None:
        """Raises what ended a commit, in the thread that trains."""
        if self._failure:
            raise self._failure

    def _work(self, snapshot: PendingCheckpoint) -> None:
        try:
            self._commit(snapshot)
        except Superseded:
            logger.info("the checkpoint of step %d makes way for a newer one", snapshot.step)
            events.emit(events.Superseded(step=snapshot.step))
        # Training hears of it at the end of its step, see `raise_failure`: a thread's own error would be lost.
        except BaseException as error:
            # What fails after that says nothing of the newer one, but for another process's other bits: they are the
            # run's.
            if snapshot.superseded.is_set() and not isinstance(error, ExactnessError):
                logger.warning("the checkpoint of step %d, which made way, failed: %s", snapshot.step, error)
            else:
                self._failure = error
        finally:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    def _commit(self, snapshot: PendingCheckpoint) -> None:
        writer = snapshot.writer or self._store.open_writer(snapshot.step, snapshot.check)
        began = self._runtime.monotonic()
        events.emit(events.Phase(phase=StagePhase.UPLOAD, step=snapshot.step))

        def send() -> tuple[Checkpoint, bool, float]:
            snapshot.check()
            writer.send(snapshot.folder)  # what is in the store already is not sent again
            uploaded = self._runtime.monotonic()
            snapshot.check()
            events.emit(events.Phase(phase=StagePhase.COMMIT, step=snapshot.step))
            # The manifest comes last: a crash before it leaves files that no reader takes for a checkpoint.
            return *self._store.commit(snapshot.step, writer, snapshot.meta()), uploaded

        def bear(error: UnavailableError, _: RetryAttempt) -> None:
            snapshot.check()
            self._is_failing = True
            unsaved = self._runtime.monotonic() - self._saved_at
            events.emit(events.StoreUnavailable(step=snapshot.step, unsaved=unsaved, reason=error.message))
            logger.warning("%s Training continues; nothing has been saved for %.0f s.", error.message, unsaved)

        # Counted from the last commit: snapshots that take each other's place share one bound.
        patience = self._max_unsaved - (began - self._saved_at)
        try:
            # A newer snapshot ends the pause, so that `make_way` need not sit it out.
            tries = backoff(patience, pause=PAUSE, sleep=snapshot.superseded.wait, runtime=self._runtime)
            checkpoint, ours, uploaded = retry(send, UnavailableError, tries, bear)
        except UnavailableError as error:
            raise self._lost_patience(error, snapshot) from error
        # Before the callback: retention in it may fail, and this one is saved.
        self._saved_at, self._is_failing = self._runtime.monotonic(), False
        self._committed(snapshot, checkpoint, ours, {"upload": uploaded - began, "commit": self._saved_at - uploaded})

    def _lost_patience(self, error: UnavailableError, snapshot: PendingCheckpoint) -> BatonError:
        snapshot.check()
        unsaved = self._runtime.monotonic() - self._saved_at
        events.emit(events.StoreUnavailable(step=snapshot.step, unsaved=unsaved, reason=error.message))
        return UnavailableError(
            f"{error.message} No checkpoint could be saved for {unsaved:.0f} s, chunks.max_unsaved is "
            f"{self._max_unsaved:.0f} s; the chunk stops.",
            remedy="Mend the store and run again: training resumes from the newest checkpoint.",
        )
