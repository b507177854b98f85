"""Signs of life of the processes that train together: who hangs, and who is slow.

Training in step, one process that stands still stops all of them, each inside some collective call, and nothing in
their logs says which it was. So each counts what it gets done, and tells the others beside training, through the store
that torch's launcher keeps for them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from components.shared import events
from components.shared.errors import BatonError
from components.shared.recipe import Recipe
from components.train_chunk import launching
from components.train_chunk.ranks import Ranks

logger = logging.getLogger("baton")

SLOW = 1.5
"""A process is slow whose own work takes so many times the median's."""
NOISE = 0.02
"""Seconds a step below which nobody is called slow."""
PAUSE = 1.0
"""Seconds at most between two looks at the others."""
TOLD_LATER = 0.3
"""Seconds from one process's stacks to the next one's, so that they do not mix in a log."""


class Pulse:
    """The signs of life of this process.

    Args:
        ranks: This process among the others.
        hang_after: Seconds without one from any process after which they hang.
        fail: Called with a message, in a thread, by the first process to see that they do; ends the process.
    """

    def __init__(self, ranks: Ranks, hang_after: float, fail: Callable[[str], None] = launching.note_failure) -> None:
        self.ranks = ranks
        self.hang_after = hang_after
        self.busy = 0.0
        self._fail = fail
        self._count = self._signs = 0
        self._doing = "start"
        self._step = 0
        self._at = time.monotonic()
        self._working_since: float | None = None
        self._excused = False
        self._heard: list[list[str]] = []
        self._heard_at = self._at
        self._slow: set[int] = set()
        self._ended = threading.Event()
        self._parent = os.getppid()

    def start(self, step: int) -> None:
        """Begins to watch; before, processes load for as long as that takes.

        Args:
            step: The first step.
        """
        from torch.distributed import PrefixStore, distributed_c10d

        self._store = PrefixStore("baton-pulse", distributed_c10d._get_default_store())
        self.beat("start", step)
        threading.Thread(target=self._work, name="baton-pulse", daemon=True).start()

    def stop(self) -> None:
        """Watches no more."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, doing: str, step: int | None = None) -> None:
        """Gives a sign of life; all processes give the same ones in the same order.

        Args:
            doing: What this process goes on to do.
            step: The step that it goes on with, where that has changed.
        """
        self._count, self._signs, self._at, self._doing = self._count + 1, 0, time.monotonic(), doing
        self._step = self._step if step is None else step

    def alive(self) -> None:
        """Gives a sign of life that the others may not give, such as a token where some write longer than others."""
        self._signs, self._at = self._signs + 1, time.monotonic()

    def fetched(self) -> None:
        """Gives a sign of life: the rows of a step are here. What that took was this process's own work."""
        self.busy += time.monotonic() - self._at
        self.beat("forward pass")

    def time_forward(self, model: Any, wrapped: Any) -> None:
        """Counts the forward passes of a model as this process's own work: around them, also where a loss is computed,
        it waits for others. What a process does with the model beside that, such as writing, does not count: others
        do not do it, or not as often.

        Args:
            model: The model.
            wrapped: The same as training calls it; before the model's own pass, DDP makes buffers the same.
        """
        began, inside = [0.0], [False]

        def enter(module: Any, *_: Any) -> None:
            if module.training:
                inside[0] = True
                self.beat("forward pass")

        def before(module: Any, *_: Any) -> None:
            began[0] = time.monotonic()

        def after(module: Any, *_: Any) -> None:
            if inside[0]:
                inside[0] = False
                self.busy += time.monotonic() - began[0]
                self.beat("loss")

        wrapped.register_forward_pre_hook(enter)
        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """Waits for the store, which has a patience of its own."""
        self._excused = True
        self._tell()
        try:
            yield
        finally:
            self._excused, self._at = False, time.monotonic()
            self._tell()

    def name_slow(self, seconds: list[float]) -> None:
        """Names the processes whose own work has taken much longer than the others'.

        Args:
            seconds: Of each process, its own work in the step that has ended.
        """
        median = statistics.median_low(seconds)
        for rank, own in enumerate(seconds):
            slow = own > SLOW * median and own - median > NOISE
            if slow and rank not in self._slow:
                logger.warning(
                    "rank %d is slow: %.2f s of its own work in step %d, half of all ranks take %.2f s or less",
                    *(rank, own, self._step, median),
                )
                events.emit("straggler", rank=rank, step=self._step, seconds=own, median=median)
            (self._slow.add if slow else self._slow.discard)(rank)

    def _tell(self) -> None:
        told = (self._count, self._step, self._doing, int(self._excused), self._signs)
        self._store.set(str(self.ranks.rank), "|".join(map(str, told)))

    def _work(self) -> None:
        told = (-1, 0)
        pause = min(PAUSE, self.hang_after / 4)
        while not self._ended.wait(pause):
            if os.getppid() != self._parent:  # whoever would have to tell and to tidy up is gone
                os._exit(1)
            if told != (self._count, self._signs):
                told = (self._count, self._signs)
                self._tell()
            silence = self._silence()
            if not silence:
                # From a thread of C: it comes also where Python's own cannot run.
                faulthandler.dump_traceback_later(self.hang_after + 10 * TOLD_LATER * self.ranks.size, file=2)
            if silence > self.hang_after:
                self._end()
                return

    def _silence(self) -> float:
        """Returns for how many seconds nobody has given a sign of life; others are asked where this process waits."""
        now = time.monotonic()
        if now - self._at < self.hang_after / 20:
            return 0.0
        if self._store.check(["hang"]):
            return math.inf
        rows = self._others()
        if rows != self._heard or any(row[3] == "1" for row in rows):
            self._heard, self._heard_at = rows, now
        return now - self._heard_at

    def _others(self) -> list[list[str]]:
        """Returns what each process has told: how often it beat, its step, what it does, whether it is excused, and how
        many signs it has given since.
        """
        keys = [str(rank) for rank in range(self.ranks.size)]
        return [
            self._store.get(key).decode().split("|") if self._store.check([key]) else ["0", "0", "start", "0", "0"]
            for key in keys
        ]

    def _end(self) -> None:
        """Shows the stacks, and has one process say what has happened."""
        self._store.set("hang", "")  # the others show theirs too, when they look next
        time.sleep(TOLD_LATER * self.ranks.local_rank)
        print(f"rank {self.ranks.rank}, process {os.getpid()}, has these stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2, all_threads=True)
        time.sleep(PAUSE + TOLD_LATER * (self.ranks.size + 1 - self.ranks.local_rank))
        message = self.verdict(self._others())
        if self._store.compare_set("verdict", "", str(self.ranks.rank)).decode() == str(self.ranks.rank):
            self._fail(message)
        time.sleep(10.0)  # the launcher ends the others
        os._exit(1)

    def verdict(self, rows: list[list[str]]) -> str:
        """Returns who hangs, and where: whoever has got least done, as the others wait for it."""
        counts = [(int(row[0]), int(row[4])) for row in rows]
        behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
        at = rows[behind[0]]
        who = f"rank {behind[0]} hangs" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))} hang"
        return (
            f"{who} in step {at[1]}, before or in its {at[2]}: no sign of life for {self.hang_after:.0f} s "
            "(training.parallel.hang_after); the stacks of all ranks are in the log."
        )


def join(ranks: Ranks, recipe: Recipe) -> None:
    """Meets the other processes; those other than the first tell nothing but warnings, under their number.

    Raises:
        BatonError: there are not as many as the recipe asks for.
    """
    if ranks.size != recipe.world_size:
        raise BatonError(f"{ranks.size} processes were started, and the recipe asks for {recipe.world_size}.")
    import torch

    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // recipe.processes)))
    torch.set_num_threads(int(threads))  # a forked process has imported it before
    ranks.join(on_gpu=recipe.resources.gpus > 0)
    if ranks.is_first:
        return
    events.mute()
    logging.getLogger("baton").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {ranks.rank} %(levelname)s %(name)s: %(message)s"))
