"""A user's callback by which the process that trains is lost, once."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any

from transformers import TrainerCallback

ENDS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "device": lambda: _raise(RuntimeError("CUDA error: an illegal memory access was encountered")),
    "store": lambda: _raise(ConnectionError("the store does not answer")),
    "mistake": lambda: _raise(TypeError("a mistake of the user's own")),
}


def _raise(error: Exception) -> None:
    from baton.errors import UnavailableError

    raise UnavailableError(f"{error}.", remedy="Wait.") if isinstance(error, ConnectionError) else error


class Lost(TrainerCallback):
    """Ends the process after a step, the first so many times.

    Args:
        ends: How, by `ENDS`.
        mark: Name of the file in the folder for temporary files with a line for each time.
        step: After which step.
        times: How often.
    """

    def __init__(self, ends: str, mark: str, step: int = 5, times: int = 1) -> None:
        self.ends, self.step, self.times = ends, step, times
        self.mark = os.path.join(tempfile.gettempdir(), mark)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the process where it is time."""
        if state.global_step != self.step:
            return
        with open(self.mark, "a+", encoding="utf-8") as file:
            file.seek(0)
            if len(file.readlines()) >= self.times:
                return
            file.write(f"{os.getpid()}\n")
            file.flush()
        ENDS[self.ends]()
