"""Commands of pipelines and train jobs that an older Baton made: the names in them run the same programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORMER = {
    "baton.components.executor": ["baton.kfp.executor"],
    "baton.components.train_chunk": ["baton.kfp.process", "train_chunk"],
}
"""Module that older commands name → module of today, and its stage."""


@pytest.mark.parametrize(("former", "today"), FORMER.items())
def test_a_former_name_runs_the_program_of_today(former: str, today: list[str]) -> None:
    told = [
        subprocess.run([sys.executable, "-m", *module, "--help"], capture_output=True, text=True, check=True).stdout
        for module in ([former], today)
    ]
    assert told[0] == told[1]
    assert "usage: " in told[0]
