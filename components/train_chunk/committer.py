"""Checkpoints on their way to the store, beside training: one at a time, and the newest wins."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from components.shared import events
from components.shared.checkpoint_store import CheckpointStore
from components.shared.errors import BatonError, StoreError, UnavailableError
from components.shared.store.bundles import BundleWriter, Manifest

logger = logging.getLogger("baton")

PAUSE = 2.0
"""Seconds between two tries while the store takes nothing."""


class Superseded(BatonError):  # noqa: N818
    """A newer checkpoint takes this one's place."""


@dataclass
class Snapshot:
    """A checkpoint staged on this machine.

    Attributes:
        step: The step at whose end it was taken.
        folder: Local folder with its files.
        digests: Digests of the state in memory when it was taken.
        meta: Returns what the manifest says besides; called once the files are in the store.
        publication: What has been sent of it already, where there was no room for all of it.
        wanted: Whether no newer one may take its place.
    """

    step: int
    folder: str
    digests: dict[str, str]
    meta: Callable[[], dict[str, Any]]
    publication: BundleWriter | None = None
    wanted: bool = False
    superseded: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises `Superseded` once it is."""
        if self.superseded.is_set():
            raise Superseded(f"a newer checkpoint takes the place of step {self.step}'s.")


class Committer:
    """Uploads and commits snapshots in a thread of its own.

    Args:
        store: The run's checkpoints.
        committed: Called in that thread with a snapshot, the manifest that stands, whether it is this process's,
            and the seconds that upload and commit took.
        max_unsaved: Seconds for which the store may take nothing before the chunk fails.
    """

    def __init__(
        self,
        store: CheckpointStore,
        committed: Callable[[Snapshot, Manifest, bool, dict[str, float]], None],
        *,
        max_unsaved: float,
    ) -> None:
        self.store = store
        self.max_unsaved = max_unsaved
        self._committed = committed
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._failure: BaseException | None = None
        self._failing: str | None = None
        self._saved_at = time.monotonic()

    @property
    def is_free(self) -> bool:
        """Whether a snapshot taken now would be sent at once: none is on its way, or it does not get through."""
        return self._thread is None or not self._thread.is_alive() or self._failing is not None

    def submit(self, snapshot: Snapshot) -> None:
        """Sends a snapshot on its way and returns at once; `make_way` comes before."""
        self._snapshot, self._failing = snapshot, None
        self._thread = threading.Thread(target=self._work, args=(snapshot,), name="baton-commit", daemon=True)
        self._thread.start()

    def make_way(self) -> None:
        """Ends what is on its way, for a newer snapshot; waits for it where it must be kept and gets through."""
        if not (self._thread and self._thread.is_alive() and self._snapshot):
            return
        if self._failing:  # it may hang in a request for a while yet: it ends by itself, and nobody waits for it
            self._snapshot.superseded.set()
            shutil.rmtree(self._snapshot.folder, ignore_errors=True)
            return
        if not self._snapshot.wanted:
            self._snapshot.superseded.set()
        self._thread.join()

    def finish(self) -> None:
        """Waits until the last snapshot is committed.

        Raises:
            BatonError: it cannot be.
        """
        if self._thread:
            self._thread.join()
        self.raise_failure()

    def settle(self, seconds: float) -> None:
        """Gives what is on its way some time to arrive, when training has failed and little else can be saved."""
        if self._thread:
            self._thread.join(seconds)

    def raise_failure(self) -> None:
        """Raises what ended a commit, in the thread that trains."""
        if self._failure:
            raise self._failure

    def _work(self, snapshot: Snapshot) -> None:
        try:
            self._commit_patiently(snapshot)
        except Superseded:
            logger.info("the checkpoint of step %d makes way for a newer one", snapshot.step)
            events.emit("superseded", step=snapshot.step)
        except BaseException as error:
            if not snapshot.superseded.is_set():
                self._failure = error
        finally:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    def _commit_patiently(self, snapshot: Snapshot) -> None:
        publication = snapshot.publication or self.store.publication(snapshot.step, snapshot.check)
        began = time.monotonic()
        events.emit("phase", phase="upload", step=snapshot.step)
        while True:
            try:
                publication.send(snapshot.folder)
                uploaded = time.monotonic()
                snapshot.check()
                events.emit("phase", phase="commit", step=snapshot.step)
                manifest, ours = self.store.commit(snapshot.step, publication, snapshot.meta())
                break
            except UnavailableError as error:
                self._bear(error, snapshot)
        self._saved_at, self._failing = time.monotonic(), None
        seconds = {"upload": uploaded - began, "commit": self._saved_at - uploaded}
        self._committed(snapshot, manifest, ours, seconds)

    def _bear(self, error: UnavailableError, snapshot: Snapshot) -> None:
        """Waits a while for a store that takes nothing, or gives up."""
        snapshot.check()  # what fails here says nothing of the newer one that has taken its place
        self._failing = error.message
        unsaved = time.monotonic() - self._saved_at
        events.emit("store_unavailable", step=snapshot.step, unsaved=unsaved, reason=error.message)
        if unsaved > self.max_unsaved:
            raise StoreError(
                f"{error.message} No checkpoint could be saved for {unsaved:.0f} s, chunks.max_unsaved is "
                f"{self.max_unsaved:.0f} s; the chunk stops.",
                remedy="Mend the store and run again: training goes on from the newest checkpoint.",
            ) from error
        logger.warning("%s Training goes on; nothing has been saved for %.0f s.", error.message, unsaved)
        snapshot.superseded.wait(PAUSE)
        snapshot.check()
