"""The processes in which twins are made and trained."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

RESUME = Path(__file__).parents[1] / "exactness"


@pytest.fixture(scope="session")
def legs() -> Any:
    """The processes of the resume tests, under the module name that the forked ones find too."""
    if str(RESUME) not in sys.path:
        sys.path.insert(0, str(RESUME))
    return importlib.import_module("legs")
