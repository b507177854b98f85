"""The state of training between two steps, by name: its parts, and the phases in which a chunk's time is counted."""

from __future__ import annotations

from enum import StrEnum

PARTS = ("weights", "optimizer", "scheduler", "scaler", "rng", "position", "callbacks", "log", "method")
"""What a checkpoint restores, item by item."""


class Phase(StrEnum):
    """What a stage is doing: the clock adds up seconds by it, and events tell when one begins."""

    START = "start"
    LAUNCH = "launch"
    IMPORT = "import"
    FETCH = "fetch"
    BUILD = "build"
    RESTORE = "restore"
    TRAIN = "train"
    SAVE = "save"
    UPLOAD = "upload"
    COMMIT = "commit"
    PRUNE = "prune"
    SCORE = "score"


PHASES_OF_A_CHUNK = (
    Phase.START,
    Phase.IMPORT,
    Phase.FETCH,
    Phase.BUILD,
    Phase.RESTORE,
    Phase.TRAIN,
    Phase.SAVE,
    Phase.UPLOAD,
)
"""Those into which a chunk's seconds are split, in the order in which it comes to them."""
