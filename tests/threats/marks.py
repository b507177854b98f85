"""A pickle that leaves a mark when it is read: where the mark is missing, nobody has run it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any


class Mark:
    """Makes a folder when it is unpickled.

    Args:
        folder: Where to make it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "it-ran"

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)

    @property
    def ran(self) -> bool:
        """Whether somebody has unpickled it."""
        return self.path.exists()

    def run(self) -> None:
        """Unpickle it, as plain pickle does, and take the mark away again: the negative control."""
        pickle.loads(pickle.dumps(self))
        assert self.ran
        self.path.rmdir()
