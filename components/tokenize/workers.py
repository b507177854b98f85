"""Segments in several processes, no more of them under way than there is room for."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from baton.components.shared.core import machine
from baton.components.shared.core.errors import BatonError
from baton.components.tokenize.segments import Made, Segment

WORKER_BYTES = 2**30
"""Memory that a worker is counted with."""
WORTHWHILE = 2**22
"""Bytes of text for which a worker is started: it begins with some seconds of imports."""
PRELOADED = [
    "baton.components.tokenize.segments",
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "pyarrow",
]
"""What the workers share: imported once, by the process that they are forked from."""


def each(
    segments: Sequence[Segment], make: Callable[[Segment], Made], workers: int | None
) -> Iterator[tuple[Segment, Made]]:
    """Yields segments as they are made.

    Args:
        segments: Which to make.
        make: Does it; must be picklable.
        workers: Processes at most; as many as there are cores and memory for when None. Little text is made here.

    Raises:
        BatonError: a worker was killed.
    """
    text = sum(segment.end - segment.start for segment in segments)
    count = min(workers or usable(), len(segments), text // WORTHWHILE)
    if count <= 1:
        yield from ((segment, make(segment)) for segment in segments)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin) as pool:
        waiting = iter(segments)
        running: dict[Future[Made], Segment] = {}
        try:
            while True:
                for segment in waiting:
                    running[pool.submit(make, segment)] = segment
                    # One more than there are workers, so that none of them waits while the caller uploads.
                    if len(running) > count:
                        break
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        except BrokenProcessPool:
            raise BatonError(
                "a process that tokenizes was killed, most likely for want of memory.",
                remedy="Lower data.workers, or give the tokenize stage more memory; what is done stays done.",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def usable() -> int:
    """Returns how many workers this machine, or its container, has cores and memory for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota() or cores, machine.available_memory() // WORKER_BYTES))


def _quota() -> int | None:
    """Returns the cores that a container may use, None where there is no limit."""
    try:
        quota, period = (machine.CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def _begin() -> None:
    """Keeps a worker to its core, where the tokenizer would take all, and ends it with the process it works for."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
