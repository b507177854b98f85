"""A process that stands by: it fetches and builds while another one trains, and waits until the machine is its own.

The one who started it holds a lock on a file, writes into it that the machine is free, and lets go. A holder that dies
lets go too, without a word, so nobody waits for ever.
"""

from __future__ import annotations

import fcntl
import tempfile

from baton.components.shared.core.errors import BatonError

FREE = b"free"


class Held:
    """The machine, held back from one process."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="baton-standby-")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def path(self) -> str:
        """The file to wait for."""
        return self._file.name

    def free(self) -> None:
        """Lets the process have the machine."""
        # Before the lock goes: who waits tells by this word whether it was let go of or its holder died.
        self._file.write(FREE)
        self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_UN)


def wait(path: str) -> None:
    """Waits until the machine is free.

    Raises:
        BatonError: the process that held it has gone.
    """
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            content = file.read()
    except FileNotFoundError:
        content = b""
    if content != FREE:
        raise BatonError("the process that this one stood by for has gone; it has done nothing.")
