"""One keeper for the processes that train together: the first one's, whose decisions all follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from components.shared.errors import BatonError
from components.shared.store.bundles import BundleWriter

if TYPE_CHECKING:
    from components.shared.preemption import Watch
    from components.train_chunk.chunk import Chunk
    from components.train_chunk.keeping import CheckpointKeeper
    from components.train_chunk.pulse import Pulse

Place = tuple[str, Callable[[str], None] | None]


class Together:
    """What a handover asks of its chunk, asked of all processes at once.

    Args:
        chunk: The chunk.
        keeper: Takes the checkpoints; None in all processes but the first.
        watch: Who tells that this machine will be taken away.
        pulse: Signs of life.
    """

    def __init__(self, chunk: Chunk, keeper: CheckpointKeeper | None, watch: Watch, pulse: Pulse) -> None:
        self.chunk, self.keeper, self.watch, self.pulse = chunk, keeper, watch, pulse
        self.ranks = chunk.ranks

    def on_first_step(self) -> None:
        """Is told that training begins."""
        if self.keeper:
            self.keeper.on_first_step()

    def agree(self, late: bool) -> tuple[bool, bool, bool]:
        """Decides for all, after each step; see `Keeper`. Any machine's notice counts, all else the first one's.

        Raises:
            BatonError: in the first process, what went wrong in the background.
        """
        ours = self.keeper.agree(late) if self.keeper else (False, False, False)
        taken = ours[0] or self.watch.notice is not None
        busy, self.pulse.busy = self.pulse.busy, 0.0
        rows = self.ranks.rows([taken, ours[1], ours[2], busy])
        stop = any(row[0] for row in rows)
        if stop:
            self._hear(self.ranks.gather(self.watch.notice))
        if self.keeper:
            self.pulse.name_slow([row[3] for row in rows])
        return stop, bool(rows[0][1]), bool(rows[0][2])

    def leaves_at_once(self) -> bool:
        """Tells whether some machine is to be taken away before training begins."""
        notices = self.ranks.gather(self.watch.notice)
        self._hear(notices)
        return any(notices)

    def _hear(self, notices: list[str | None]) -> None:
        first = next((notice for notice in notices if notice), None)
        if self.keeper and first:
            self.keeper.told = first

    def places(self, num_bytes: int) -> Iterator[Place]:
        """Yields folders to write a checkpoint to: one of each machine, the same for its processes."""
        self.pulse.beat("checkpoint")
        ours: Iterator[Any] = iter(())
        if self.keeper:
            ours = self.keeper.places(num_bytes)
        elif self.ranks.leads_node:
            ours = self.chunk.staging.places(num_bytes)
        with self.pulse.excused():  # the checkpoint before may be on its way
            found = self.ranks.node_says(lambda: self._next(ours))
        while found:
            yield found, None
            found = self.ranks.node_says(lambda: self._next(ours))

    def _next(self, places: Iterator[Any]) -> str | None:
        folder, last = next(places, (None, True))
        if last is None or last is True:
            found: str | None = folder
            return found
        raise BatonError(
            "there is no room to stage a checkpoint, neither in memory nor on disk, and several processes cannot send "
            "theirs file by file.",
            remedy="Give the pod more resources.shm, or a larger disk for its temporary files.",
        )

    def save(self, step: int, folder: str, digests: dict[str, str], *, wanted: bool) -> None:
        """Takes a complete checkpoint: all processes have written theirs."""
        with self.pulse.excused():
            self._join_nodes(step, folder)
            if self.keeper:
                self.keeper.save(step, folder, digests, wanted=wanted)
            self.ranks.gather(None)

    def _join_nodes(self, step: int, folder: str) -> None:
        """Sends what other machines have written, as part of the first one's attempt; that commits it all."""
        if self.ranks.nodes == 1:
            return
        attempt = self.ranks.first_says(lambda: self.keeper.attempt(step).folder if self.keeper else "")
        sent: dict[str, Any] = {}
        if self.ranks.leads_node and self.ranks.node:
            part: BundleWriter = self.chunk.store.publication(step)
            part.folder = attempt
            part.send(folder)
            sent = part.files
        for files in self.ranks.gather(sent):
            if self.keeper:
                self.keeper.attempt(step).files.update(files)
