"""Heartbeats of the ranks that train together, which tell the one that hangs.

One process that stops halts all, each inside a collective call, and no log tells which it was. So each rank counts its
work, and tells the others from a thread, through the store of torch's launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.train.distributed import launch
from baton.train.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.nn import Module

ALONE = Ranks()
PAUSE = 1.0  # seconds
STAGGER = 0.3
"""Seconds from one rank's stacks to the next one's, so that they do not mix in a log."""


@dataclass(frozen=True)
class Heartbeat:
    """Newest heartbeat of a rank, which the others read."""

    count: int = 0
    step: int = 0
    doing: str = "start"
    is_paused: bool = False
    """Waits for the store."""
    ticks: int = 0

    @classmethod
    def parse(cls, text: bytes) -> Heartbeat:
        count, step, doing, paused, ticks = text.decode().split("|")
        return cls(int(count), int(step), doing, paused == "1", int(ticks))

    def __str__(self) -> str:
        return f"{self.count}|{self.step}|{self.doing}|{int(self.is_paused)}|{self.ticks}"


class Watchdog:
    """Heartbeats of this rank, and a thread that watches those of the others; none in a world of one rank.

    `hang_after` is in seconds. The first rank to notice calls `fail` with a message, in a thread; it ends the process.
    """

    def __init__(
        self,
        ranks: Ranks = ALONE,
        hang_after: float = math.inf,
        fail: Callable[[str], None] = launch.note_failure,
    ) -> None:
        self.ranks = ranks
        self.hang_after = hang_after
        self.is_watching = ranks.size > 1
        self.beats_of_a_pass: tuple[str, ...] = ("forward pass", "backward pass")
        self._fail = fail
        self._count = self._ticks = 0
        self._doing = "start"
        self._step = 0
        self._at = time.monotonic()
        self._is_paused = False
        self._heard: list[Heartbeat] = []
        self._heard_at = self._at
        self._ended = threading.Event()
        self._parent = os.getppid()

    def start(self, step: int) -> None:
        """Begins to watch, from the first step; before, processes load for as long as that takes."""
        if not self.is_watching:
            return
        from torch.distributed import PrefixStore, distributed_c10d

        # The launcher's own store, for which torch has no public name. A collective call would wait for the very rank
        # that hangs.
        self._store = PrefixStore("baton-watchdog", distributed_c10d._get_default_store())
        self.heartbeat("start", step)
        threading.Thread(target=self._work, name="baton-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self.is_watching:
            faulthandler.cancel_dump_traceback_later()

    def heartbeat(self, doing: str, step: int | None = None) -> None:
        """Tells the next work and its step, if that has changed; all ranks tell the same in the same order."""
        self._count, self._ticks, self._at, self._doing = self._count + 1, 0, time.monotonic(), doing
        self._step = self._step if step is None else step

    def tick(self) -> None:
        """Gives a sign of life that the others may not give, such as a token where some generate longer than others."""
        self._ticks, self._at = self._ticks + 1, time.monotonic()

    def follow(self, model: Module) -> None:
        """Has a model, as training calls it, beat before and after each forward pass in training."""
        if not self.is_watching:
            return
        import torch

        # Two beats around each pass: DDP waits for the others as it begins, and a loss may after it.
        self.beats_of_a_pass = ("forward pass", "forward pass", "loss", "backward pass")

        def beats(doing: str) -> Callable[..., None]:
            def hook(module: Module, *_: object) -> None:
                # What generates, or asks the model as a reference, may call the same module: without gradients.
                if module.training and torch.is_grad_enabled():
                    self.heartbeat(doing)

            return hook

        model.register_forward_pre_hook(beats("forward pass"))
        model.register_forward_hook(beats("loss"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while this rank waits for the store, which has its own patience."""
        if not self.is_watching:
            yield
            return
        self._is_paused = True
        self._tell()
        try:
            yield
        finally:
            self._is_paused, self._at = False, time.monotonic()
            self._tell()

    def _tell(self) -> None:
        newest = Heartbeat(self._count, self._step, self._doing, self._is_paused, self._ticks)
        self._store.set(str(self.ranks.rank), str(newest))

    def _work(self) -> None:
        # No count is below 0: the first look tells the others that this rank is there.
        told = (-1, 0)
        pause = min(PAUSE, self.hang_after / 4)
        while not self._ended.wait(pause):
            if os.getppid() != self._parent:  # the launching process, which would report and clear up, is gone
                os._exit(1)
            if told != (self._count, self._ticks):
                told = (self._count, self._ticks)
                self._tell()
            silence = self._silence()
            if not silence:
                # From a thread of C: it fires also where a call that hangs holds the interpreter's lock.
                faulthandler.dump_traceback_later(self.hang_after + 10 * STAGGER * self.ranks.size, file=2)
            if silence > self.hang_after:
                self._end()
                return

    def _silence(self) -> float:
        """Returns the seconds since any rank's last sign of life; others are asked only where this one waits."""
        now = time.monotonic()
        if now - self._at < self.hang_after / 20:
            return 0.0
        if self._store.check(["hang"]):
            return math.inf
        newest = self._others()
        if newest != self._heard or any(beat.is_paused for beat in newest):
            # Any rank's will do: while one gets on, the others wait with reason.
            self._heard, self._heard_at = newest, now
        return now - self._heard_at

    def _others(self) -> list[Heartbeat]:
        keys = [str(rank) for rank in range(self.ranks.size)]
        return [Heartbeat.parse(self._store.get(key)) if self._store.check([key]) else Heartbeat() for key in keys]

    def _end(self) -> None:
        self._store.set("hang", "")  # the others show theirs too, when they look next
        time.sleep(STAGGER * self.ranks.local_rank)
        print(f"rank {self.ranks.rank}, process {os.getpid()}, has these stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2, all_threads=True)
        time.sleep(PAUSE + STAGGER * (self.ranks.size + 1 - self.ranks.local_rank))
        message = self.verdict(self._others())
        # The first to come here speaks for all: a launcher's report of every rank would say the same of each.
        if self._store.compare_set("verdict", "", str(self.ranks.rank)).decode() == str(self.ranks.rank):
            self._fail(message)
        time.sleep(10.0)  # the launcher ends the others
        os._exit(1)

    def verdict(self, newest: list[Heartbeat]) -> str:
        """Names the rank that hangs, and where: the one that has done least, as the others wait for it."""
        counts = [(beat.count, beat.ticks) for beat in newest]
        hanging = [rank for rank, count in enumerate(counts) if count == min(counts)]
        at = newest[hanging[0]]
        who = f"rank {hanging[0]} hangs" if len(hanging) == 1 else f"ranks {', '.join(map(str, hanging))} hang"
        return (
            f"{who} in step {at.step}, before or in its {at.doing}: no sign of life for {self.hang_after:.0f} s "
            "(training.parallel.hang_timeout); the stacks of all ranks are in the log."
        )
