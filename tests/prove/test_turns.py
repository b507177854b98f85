"""Proofs and drills in which the number of processes changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.errors import UserError
from baton.prove import prove
from baton.recipe import load

RECIPE = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
VIRTUAL = ["training.parallel.virtual_workers=4", "training.micro_batch_size=1", "training.threads=1"]


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("1,2", [], "virtual_workers"),
        ("1,3", VIRTUAL, "divide the 4 virtual workers"),
        ("1,0", VIRTUAL, "divide the 4 virtual workers"),
        ("two", VIRTUAL, "divide the 4 virtual workers"),
    ],
)
def test_numbers_that_cannot_share_the_workers_are_refused(text: str, overrides: list[str], expected: str) -> None:
    recipe = load.load(RECIPE, ["store=s3://bucket", *overrides])
    with pytest.raises(UserError, match=expected):
        prove.parse_processes(text, recipe)


@pytest.mark.slow
def test_a_proof_in_which_processes_take_turns(tmp_path: Path) -> None:
    page = tmp_path / "proof.html"
    command = ["prove", RECIPE, "--chunks", "1,3", "--processes", "1,4,2", "--report", str(page), "--output", "json"]
    command += ["--store", str(tmp_path / "store")]
    told = CliRunner().invoke(app, command + [word for override in VIRTUAL for word in ("--set", override)])
    assert told.exit_code == 0, told.output
    proof = json.loads(told.stdout)
    assert proof["exact"]
    assert proof["processes"] == [1, 4, 2]
    assert "which 1, 4, 2 processes trained in turns" in page.read_text()
