"""`requirements.lock`: versions alone, which any machine can install."""

import re
from pathlib import Path


def test_it_names_versions_and_no_place() -> None:
    lines = (Path(__file__).parents[2] / "requirements.lock").read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert len(named) > 100
    assert [line for line in named if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.+!-]+", line)] == []
