"""Collective checkpoints: ranks agree on one, find room for it, and wait until all have written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.components.shared.core.errors import BatonError
from baton.components.shared.store.bundles import BundleWriter
from baton.components.shared.store.manifests import FileEntry
from baton.components.train_chunk.checkpointing.lineage import Capture
from baton.components.train_chunk.checkpointing.staging import Staging
from baton.components.train_chunk.context import TrainContext
from baton.components.train_chunk.distributed.preemption import PreemptionWatch
from baton.components.train_chunk.distributed.watchdog import NullWatchdog
from baton.components.train_chunk.trainer.base import Place

Files = dict[str, FileEntry]
"""Name → size and SHA-256 of files that were sent."""


@dataclass(frozen=True)
class Decision:
    """The ranks' common decision after a step.

    Attributes:
        leave: Whether to save and end the chunk here.
        is_late: Whether a checkpoint is due by time.
        is_free: Whether one captured now would be sent at once.
        figures: What each rank had to tell of the step.
    """

    leave: bool = False
    is_late: bool = False
    is_free: bool = False
    figures: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, kw_only=True)
class Services:
    """What a rank works with.

    Attributes:
        context: The chunk.
        staging: Where checkpoints are written.
        watch: Tells that this machine will be preempted.
        watchdog: Signs of life.
    """

    context: TrainContext
    staging: Staging
    watch: PreemptionWatch
    watchdog: NullWatchdog


class CollectiveCheckpointManager:
    """The part of one rank in the checkpoints of a chunk. The first rank's is a `CheckpointManager`, which commits.

    All ranks call the same methods in the same order: each gathers. A world of one rank agrees with itself.

    Args:
        services: What the rank works with.
    """

    def __init__(self, services: Services) -> None:
        self._context = services.context
        self._staging = services.staging
        self._watch = services.watch
        self._watchdog = services.watchdog
        self._ranks = services.context.ranks

    def on_first_step(self) -> None:
        """Notes that training begins."""

    def agree(self, is_late: bool, figures: Sequence[float] = ()) -> Decision:
        """Decides for all after each step. Any machine's notice of preemption counts, all else the first rank's word.

        Args:
            is_late: Whether a checkpoint is due by time.
            figures: What this rank has to tell of the step, as many as each.

        Raises:
            BatonError: in the first rank, what went wrong in the background.
        """
        ours = self._judge(is_late)
        leave = ours.leave or self._watch.notice is not None
        numbers = [leave, ours.is_late, ours.is_free, *figures]
        # One gather a step for all that the ranks must agree on.
        rows = self._ranks.gather_numbers([float(number) for number in numbers])
        # What is due by time is the first rank's word: clocks differ, and all must save at the same step.
        told = [row[3:] for row in rows] if figures else ()
        decision = Decision(any(row[0] for row in rows), bool(rows[0][1]), bool(rows[0][2]), told)
        if decision.leave:  # the same in all ranks, so that all gather once more or none does
            self._hear(self._ranks.gather(self._watch.notice))
        return decision

    def leaves_at_once(self) -> bool:
        """Tells whether some machine is to be preempted before training begins."""
        notices = self._ranks.gather(self._watch.notice)
        self._hear(notices)
        return any(notices)

    def places(self, num_bytes: int) -> Iterator[Place]:
        """Yields folders to write a checkpoint to: one of each machine, the same for its ranks."""
        self._watchdog.beat("checkpoint")
        ours = self._places_here(num_bytes)
        with self._watchdog.excused():  # the checkpoint before may be on its way
            place = self._ranks.on_node_leaders(lambda: self._next(ours))
        while place:
            yield place
            # Comes back here only where some rank ran out of room: then all try the next place together.
            place = self._ranks.on_node_leaders(lambda: self._next(ours))

    def save(self, capture: Capture) -> None:
        """Takes a complete checkpoint: all ranks have written their part.

        Returns once the first rank has taken it, so that no rank trains on while it may still fail.
        """
        with self._watchdog.excused():
            self._join_nodes(capture.step, capture.folder)
            self._take(capture)
            self._ranks.gather(None)

    def finish(self) -> None:
        """Waits until the last checkpoint is committed."""

    def close(self) -> None:
        """Ends what runs beside training; a checkpoint on its way has a moment to arrive."""

    def _judge(self, is_late: bool) -> Decision:
        """Returns what this rank knows that the others do not; see `agree`."""
        return Decision()

    def _take(self, capture: Capture) -> None:
        """Sends a complete checkpoint on its way."""

    def _hear(self, notices: list[str | None]) -> None:
        """Notes why some machine is to be preempted."""

    def _add_files(self, step: int, files: Files) -> None:
        """Adds what another machine has sent to the checkpoint that is being written."""

    def _writer(self, step: int) -> BundleWriter:
        """Returns the attempt at the checkpoint that is being written."""
        return self._context.store.open_writer(step)

    def _send_off(self, folder: str) -> None:
        """Sends the files of a folder and removes them."""
        raise NotImplementedError("a checkpoint of several ranks fits its folder, see `_next`")

    def _places_here(self, num_bytes: int) -> Iterator[Place]:
        if self._ranks.leads_node:
            for folder, fits in self._staging.places(num_bytes):
                yield Place(folder, None if fits else self._send_off)

    def _next(self, places: Iterator[Place]) -> Place | None:
        place = next(places, None)
        if place and place.send and self._ranks.size > 1:
            raise BatonError(
                "there is no room to stage a checkpoint, neither in memory nor on disk, and several processes cannot "
                "send theirs file by file.",
                remedy="Give the pod more resources.shm, or a larger disk for its temporary files.",
            )
        return place

    def _join_nodes(self, step: int, folder: str) -> None:
        """Sends what other machines have written, as part of the first one's attempt; that commits it all."""
        if self._ranks.nodes == 1:
            return
        # All machines write into the first one's folder, whose manifest names their files: one commit, or none.
        attempt = self._ranks.on_first(lambda: self._writer(step).folder)
        part = self._context.store.open_writer(step)
        part.folder = attempt
        if self._ranks.leads_node and self._ranks.node and os.path.isdir(folder):  # with virtual workers it has no part
            part.send(folder)
        # After each machine has sent its files: the first one then commits what is in the store, and nothing else.
        for files in self._ranks.gather(part.files):
            self._add_files(step, files)
