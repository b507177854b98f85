"""Training methods, one file each, found by the name in `training.method`; see the README beside this file."""

from __future__ import annotations

import importlib
from types import ModuleType


def load(method: str) -> ModuleType:
    """Returns a method's module, whose `build` takes a `Setup` and returns a trainer."""
    return importlib.import_module(f"{__name__}.{method}")
