"""A fuzzer that finds nothing has to be one that finds faults: those that are planted, each of its kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tools.fuzz.driver import ATHERIS, fuzz

pytestmark = [
    pytest.mark.slow,  # `make fuzz` runs them, after it has installed the fuzzer
    pytest.mark.skipif(
        not (ATHERIS / "atheris").is_dir() and importlib.util.find_spec("atheris") is None,
        reason="atheris is not installed: `make fuzz` does that",
    ),
]
FOUND = {
    "traceback": "KeyError tools/fuzz/planted.py",
    "hang": "timeout tools/fuzz/planted.py",
    "memory": "memory",
    "endless": "oom",
}
"""Planted fault → how what is told of it begins."""


@pytest.mark.parametrize(("name", "kind"), FOUND.items(), ids=FOUND)
def test_a_planted_fault_is_found(name: str, kind: str, tmp_path: Path) -> None:
    outcome = fuzz(name, tmp_path, 60, until_found=True)

    told = [finding.read_text(encoding="utf-8") for finding in outcome.findings]
    assert [text.startswith(kind) for text in told] == [True], told
    assert outcome.findings[0].with_suffix(".bin").read_bytes().startswith(b"BAD")
