"""A chunk as in its pod, whose process is killed once: `python -m benchmarks.pod FOLDER SECONDS RUN_URI INDEX`.

It is killed so many seconds after its first step, and the process that takes its place goes on.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from baton import events
from baton.checkpoint import staging
from baton.train import supervisor
from baton.train.chunk import Outcome, run_chunk


def _train(run_uri: str, index: int) -> Outcome | None:
    is_first = True

    def hear(event: events.Event) -> None:
        nonlocal is_first
        if is_first and isinstance(event, events.Step):
            is_first = False
            threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()

    killed = Path(staging.MEMORY, "killed")
    if not killed.exists():
        killed.touch()
        events.hear(hear)
    return run_chunk(run_uri, index)


if __name__ == "__main__":
    staging.MEMORY, SECONDS = sys.argv[1], float(sys.argv[2])
    supervisor.PAUSE_S = 0.0  # it is the same on both sides, and no work
    with events.stage("train chunk"):
        supervisor.run(sys.argv[3], int(sys.argv[4]), _train)
