"""What the tests here share: whether there is a GPU, and the table of what they tell."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch

from tests.exactness.conftest import base_model, grid, legs  # noqa: F401
from tests.gpu import wheels

HAS_GPU = torch.cuda.is_available()
ROWS = "BATON_GPU_ROWS"
"""Environment variable: file with a line for each test that has ended, for the table."""
FOLDER = "BATON_GPU_FOLDER"
"""Environment variable: folder of runs that a second call goes on with."""


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Tells a figure for the table: what it is, its value in words, and the goal where there is one."""

    def note(what: str, value: str, goal: str = "") -> None:
        record_property("figure", [what, value, goal])

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Appends a line for each test that has ended: its outcome, its figures, and why it was skipped or failed."""
    path = os.environ.get(ROWS)
    # Workers report to the process that started them, which reports again.
    if not path or "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    outcome, why, crash = report.outcome, "", report.longrepr
    if outcome == "skipped" and isinstance(crash, tuple):
        why = crash[2].removeprefix("Skipped: ")
    elif outcome == "failed":
        outcome = "failed" if report.when == "call" else "error"
        text = str(getattr(getattr(crash, "reprcrash", None), "message", crash))
        lines = [line for line in text.splitlines() if "rror" in line]
        why = (lines or text.splitlines() or [""])[-1][-300:]
    function, _, cell = report.nodeid.rpartition("::")[2].partition("[")
    name = cell.removesuffix("]") if function.endswith("_of_one_run") else f"{function}[{cell}"
    row = {
        "node": report.nodeid,
        "name": name.removesuffix("[").removeprefix("test_").replace("_", " "),
        "outcome": outcome,
        "why": why,
        "figures": [value for name, value in report.user_properties if name == "figure"],
        "seconds": report.duration,
        "commit": wheels.commit(),
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
