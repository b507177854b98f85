"""What a short chunk has for a database of this machine, held back as files until somebody sends it.

Opening a database takes two seconds of a core, as MLflow's own client has to be imported for it: a short chunk takes no
more for its steps. So the lines are kept below the run, each as soon as there is one, and go with those of the next
process that opens the database: a chunk that lasts, the evaluation, the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from baton.components.shared.core import events


class Held:
    """Lines that are held back.

    Args:
        folder: Where.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        os.makedirs(folder, exist_ok=True)
        # By time: they are sent in the order in which they were begun.
        path = os.path.join(folder, f"{time.time_ns():019d}-{uuid.uuid4().hex[:6]}.jsonl")
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the chunk
        # Let go by its end, however it ends: who sends finds by it the files that nobody writes to any more.
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def write(self, document: Mapping[str, object]) -> None:
        """Keeps a line, whatever becomes of this process."""
        with self._lock:
            if self._file.closed:  # a thread that samples the machine may come late
                return
            try:
                self._file.write(json.dumps(document) + "\n")
                self._file.flush()
            except OSError as error:  # a full disk is no reason to stop training
                events.warn(f"metrics are not kept for MLflow: {error}")
                self._end()

    def close(self) -> None:
        """Ends it."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is not written now either
            self._file.close()


def files(folder: str | None) -> list[str]:
    """Returns the paths of files that are held back, the oldest first."""
    if folder is None or not os.path.isdir(folder):
        return []
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".jsonl")]


def ended(folder: str | None) -> list[tuple[str, list[dict[str, Any]]]]:
    """Returns path and lines of each file that nobody writes to any more, the oldest first."""
    return [(path, documents) for path in files(folder) if (documents := _read(path)) is not None]


def _read(path: str) -> list[dict[str, Any]] | None:
    """Returns the lines of a file, None where it is being written; the last may have been cut off with its process."""
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return [json.loads(line) for line in file if line.endswith("\n")]
