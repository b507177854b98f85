"""What the tests here share: whether there is a GPU, and the table of what they tell."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exactness.conftest import base_model, grid, legs  # noqa: F401

HAS_GPU = torch.cuda.is_available()
ROWS = "BATON_GPU_ROWS"
"""Environment variable: file to which what the tests tell is written, for the table."""


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Tells a figure for the table: what it is, its value in words, and the goal where there is one."""

    def note(what: str, value: str, goal: str = "") -> None:
        record_property("figure", [what, value, goal])

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Writes what each test has told, how it ended, and why it was skipped."""
    path = os.environ.get(ROWS)
    if not path:
        return
    rows = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            figures = [value for name, value in report.user_properties if name == "figure"]
            why = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else ""
            if outcome in ("failed", "error"):
                crash = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
                lines = [line for line in crash.splitlines() if "rror" in line]
                why = (lines or crash.splitlines() or [""])[-1][-300:]
            function, _, cell = report.nodeid.rpartition("::")[2].partition("[")
            name = cell.removesuffix("]") if function.endswith("_of_one_run") else f"{function}[{cell}"
            name = name.removesuffix("[").removeprefix("test_").replace("_", " ")
            rows.append({"name": name, "outcome": outcome, "why": why, "figures": figures, "seconds": report.duration})
    Path(path).write_text(json.dumps(rows), encoding="utf-8")
