"""What a chunk keeps: snapshots on the training thread, manifests and retention on the thread beside it."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psutil

from components.shared import events, retention
from components.shared.errors import BatonError, ExactnessError
from components.shared.runs import now
from components.shared.store.bundles import BundleWriter, Manifest
from components.train_chunk.committer import Committer, Snapshot
from components.train_chunk.progress import Progress

if TYPE_CHECKING:
    from components.shared.preemption import Watch
    from components.train_chunk.chunk import Chunk
    from components.train_chunk.restoring import Restored
    from components.train_chunk.resume import Handover

logger = logging.getLogger("baton")

LAST_MOMENT = 30.0
"""Seconds for which a chunk that failed waits for the checkpoint it had on its way."""
SOON = 5.0
"""Seconds for which one request of a commit is tried again before the commit counts as failing."""


class CheckpointKeeper:
    """Takes checkpoints from the trainer and brings them to the store.

    Args:
        chunk: The chunk it works for.
        trainer: Its trainer.
        restored: The checkpoint it goes on from.
        watch: Who tells that the machine will be taken away.

    Attributes:
        parent: The newest checkpoint of this run that this process restored or committed.
        overtaken: Whether another process has committed the target.
        told: Notice that another machine of this chunk will be taken away.
    """

    handover: Handover

    def __init__(self, chunk: Chunk, trainer: Any, restored: Restored | None, watch: Watch) -> None:
        self.chunk = chunk
        self.trainer = trainer
        self.watch = watch
        self.recipe = chunk.recipe
        self.parent: tuple[int, Manifest] | None = (restored.step, restored.manifest) if restored else None
        self.start_step = restored.step if restored else 0
        self._restored_folder = restored.folder if restored else None
        self.before: dict[str, Any] = restored.manifest.meta if restored else {}
        self.overtaken = restored is not None and restored.stands
        self.told: str | None = None
        self.stalls: list[float] = []
        self.progress = Progress(chunk.run, chunk.index)
        self.lost = self.progress.lost(self.start_step)
        self.committer = Committer(chunk.store, self._committed, max_unsaved=self.recipe.chunks.max_unsaved_seconds)
        self._fingerprint = chunk.fingerprint()
        self._publication: BundleWriter | None = None
        self._stall_began = 0.0
        self._saved_at = time.monotonic()
        self._patience = chunk.run.storage.patience

    @property
    def reached(self) -> int:
        """The step of the newest checkpoint."""
        return self.parent[0] if self.parent else 0

    def on_first_step(self) -> None:
        """Notes that training begins."""
        self.chunk.clock.enter("train")
        self._saved_at = time.monotonic()
        if self._restored_folder:
            self.chunk.staging.drop(self._restored_folder)  # one copy in memory, not two
        self.progress.start(self.start_step)
        # A checkpoint that does not get through is to be noticed soon; `Committer` has the patience.
        self.chunk.run.storage.patience = min(self._patience, SOON)

    @property
    def notice(self) -> str | None:
        """Why the chunk is to leave: this machine's notice, or another's of those that train together."""
        return self.watch.notice or self.told

    def agree(self, late: bool) -> tuple[bool, bool, bool]:
        """Tells, after each step, what to do; see `resume.Keeper`."""
        self.progress.step = self.trainer.state.global_step
        self.committer.raise_failure()
        stop = self.overtaken or self.watch.notice is not None
        return stop, late, self.recipe.chunks.wait_for_commit or self.committer.is_free

    def places(self, num_bytes: int) -> Iterator[tuple[str, Callable[[str], None] | None]]:
        """Yields folders to write a checkpoint to; the last with what sends each file off as it is written."""
        self.chunk.clock.enter("save", step=self.trainer.state.global_step)
        self._stall_began = time.monotonic()
        self.committer.make_way()
        self.committer.raise_failure()
        for folder, fits in self.chunk.staging.places(num_bytes):
            self._publication = None if fits else self.chunk.store.publication(self.trainer.state.global_step)
            yield folder, None if fits else self._send_off

    def attempt(self, step: int) -> BundleWriter:
        """Returns the attempt at the checkpoint that is being written, for what other machines add to it."""
        if self._publication is None:
            self._publication = self.chunk.store.publication(step)
        return self._publication

    def _send_off(self, folder: str) -> None:
        assert self._publication
        self._publication.send(folder)
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))

    def save(self, step: int, folder: str, digests: dict[str, str], *, wanted: bool) -> None:
        """Takes a complete checkpoint folder and sends it on its way; a wanted one is not given up for a newer one."""
        every = self.recipe.chunks.keep.every
        trained_for = self.chunk.clock.seconds.get("train", 0.0)
        snapshot = Snapshot(
            step,
            folder,
            digests,
            lambda: self._meta(digests, trained_for),
            publication=self._publication,
            wanted=wanted or bool(every and step % every == 0),
        )
        if self.overtaken:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self.committer.submit(snapshot)
            if self.recipe.chunks.wait_for_commit or self._publication:
                self.committer.finish()
        self.stalls.append(time.monotonic() - self._stall_began)
        self.chunk.clock.enter("train")

    def finish(self) -> None:
        """Waits until the last checkpoint is committed."""
        self.chunk.clock.enter("upload")
        self.committer.finish()
        self.chunk.run.storage.patience = self._patience

    def close(self) -> None:
        """Ends what runs beside; a checkpoint on its way has a moment to arrive."""
        self.committer.settle(LAST_MOMENT)
        self.progress.end()

    def figures(self) -> dict[str, Any]:
        """Returns what this attempt cost, for its record."""
        return {
            "lost_steps": self.lost.steps,
            "lost_seconds": self.lost.seconds,
            "save_stalls": self.stalls,
            "peak_bytes": _peak_bytes(),
        }

    def live(self) -> dict[str, float]:
        """Returns how far the chunk is now, by the names in `components.shared.telemetry.LIVE`."""
        work = self._work(self.chunk.clock.split().get("train", 0.0))
        return {
            "step": self.trainer.state.global_step,
            "target_step": self.chunk.target,
            "checkpoint_step": self.reached,
            "unsaved_seconds": time.monotonic() - self._saved_at,
            "goodput": work["goodput"],
            "lost_steps": work["lost_steps"],
        }

    def _meta(self, digests: dict[str, str], trained_for: float) -> dict[str, Any]:
        """Returns what a manifest says besides its files."""
        parent, chunk = self.parent, self.chunk
        chain = hashlib.sha256(f"{parent[1].meta['chain'] if parent else ''}{digests['state']}".encode()).hexdigest()
        return {
            "digest": digests["state"],
            "state": digests,
            "parent": {"step": parent[0], "digest": parent[1].meta["digest"]} if parent else None,
            "chain": chain,
            "restored": {
                "step": self.start_step,
                "checked": self.handover.checked or None,
                "level": chunk.level,
                "skipped": chunk.restorer.skipped,
            },
            "identity": chunk.restorer.identity,
            "finished": self.handover.finished,
            "fingerprint": self._fingerprint,
            "trainable_parameters": self.handover.num_trainable(),
            "chunk": chunk.index,
            "created": now(),
            "seconds": chunk.clock.split(),
            "moved": {"sent": chunk.run.storage.sent, "received": chunk.run.storage.received},
            "work": self._work(trained_for),
        }

    def _work(self, trained_for: float) -> dict[str, Any]:
        """Returns what the run has cost so far, all its chunks together."""
        before = self.before.get("work", {})
        started = before.get("started") or self.chunk.clock.began
        trained = before.get("trained_seconds", 0.0) + trained_for
        return {
            "started": started,
            "trained_seconds": trained,
            "goodput": trained / max(time.time() - started, 1e-9),
            "lost_steps": before.get("lost_steps", 0) + self.lost.steps,
            "lost_seconds": before.get("lost_seconds", 0.0) + self.lost.seconds,
        }

    def _committed(self, snapshot: Snapshot, manifest: Manifest, ours: bool, seconds: dict[str, float]) -> None:
        """Takes note of a commit, in the thread beside training."""
        step, store = snapshot.step, self.chunk.store
        if not ours:
            self._meet_other(step, manifest, snapshot.digests)
        if self.reached <= step:
            self.parent = (step, manifest)
        self._saved_at = time.monotonic()
        uri, digest = store.uri(step, manifest), manifest.meta["digest"]
        events.emit("checkpoint", step=step, uri=uri, digest=digest, bytes=manifest.bytes, seconds=seconds)
        if ours and self.chunk.cache and not self.chunk.run.storage.is_local:
            for name, entry in manifest.files.items():
                self.chunk.cache.keep(entry["sha256"], os.path.join(snapshot.folder, name))
        if step < self.chunk.target:
            self._look_around()

    def _look_around(self) -> None:
        """Sees whether another process is ahead, and applies retention; failing in it is no reason to stop."""
        try:
            self.overtaken = self.chunk.restorer.standing() is not None
            retention.prune(
                self.chunk.store, self.recipe.chunks.keep, targets=self.chunk.plan.targets, in_use=self.start_step
            )
        except (BatonError, FileNotFoundError) as error:
            logger.warning("old checkpoints were not removed: %s", error)

    def _meet_other(self, step: int, manifest: Manifest, digests: dict[str, str]) -> None:
        if manifest.meta["digest"] != digests["state"]:
            raise ExactnessError(
                f"another process committed step {step} with digest {manifest.meta['digest'][:12]}…, this one has "
                f"{digests['state'][:12]}…; this one stops.",
                remedy="Give each run a name of its own; if this is one run, the hardware differs.",
            )
        logger.warning("another process committed step %d first, with the same state; going on", step)


def _peak_bytes() -> int:
    """Returns the most memory this process has held at once."""
    info = psutil.Process().memory_info()
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return int(info.rss)
