"""One thing that `baton doctor` has looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: What.
        state: `problem` stops a run or loses data; `note` costs speed or comfort.
        found: What was found.
        remedy: What to do about it; empty where nothing need be done.
    """

    name: str
    state: Literal["ok", "note", "problem"]
    found: str
    remedy: str = ""
