"""`baton demo`: curves drawn over each other, and a run without the model's package or a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli import demo
from baton.prove.demo import Kill

BATON = str(Path(sys.executable).with_name("baton"))


def test_equal_curves_are_one() -> None:
    drawn = demo.chart([3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [Kill(2, 1)])
    assert drawn.count("●") == 3 + 1  # and the legend's
    assert "○" not in drawn
    assert "×" not in drawn
    assert drawn.count("✗") == 2
    assert max(map(len, drawn.replace("[green]", "").replace("[red]", "").replace("[/]", "").splitlines())) <= 80


def test_a_difference_shows() -> None:
    drawn = demo.chart([3.0, 2.0, 1.0], [3.0, 2.0, 1.5], [])
    assert (drawn.count("○"), drawn.count("×")) == (1, 1)


def test_a_flat_curve_is_drawn() -> None:
    assert demo.chart([1.0], [1.0], []).count("●") == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_the_model_a_small_one_is_trained_and_said_to_be(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "BATON_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [BATON, "demo", "--store", str(tmp_path / "store"), "--json"],
        capture_output=True, text=True, env={**os.environ, **offline}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["proof"]["exact"]
    assert [kill["step"] for kill in result["kills"]] == [6, 14, 22]
    assert [kill["resumed"] for kill in result["kills"]] == [4, 12, 20]
    assert "cannot be fetched from the package index" in result["instead"]
    assert "small model from scratch" in done.stderr
    assert Path(result["proof"]["report"]).is_file()
    assert list(tmp_path.glob("*.html")) == []
