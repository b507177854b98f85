"""`baton demo`: curves drawn over each other, and a run without the model's package or a network."""

from __future__ import annotations

import json
import os
import re
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
    page = Path(result["proof"]["report"])
    assert (
        "killed with SIGKILL 3 times (✗): at step 6, resumed from 4; at step 14, resumed from 12;" in page.read_text()
    )
    assert '<a href="report.html">' in page.read_text()
    report = (page.parent / "report.html").read_text()
    for kill in result["kills"]:
        assert f"Killed after step {kill['step']}, resumed from step {kill['resumed']}" in report
    assert "every resume was bit-identical: 2 from chunk to chunk, 3 after a kill" in report
    assert list(tmp_path.glob("*.html")) == []


@pytest.mark.slow
def test_a_recipe_takes_the_demo_s_place(tmp_path: Path) -> None:
    small = ["model.from_scratch.hidden_size=32", "data.max_samples=400", "training.max_steps=12", "chunks.count=2"]
    changes = [
        part for change in [*small, "chunks.checkpoint_every=2", "tracking.mlflow=null"] for part in ("--set", change)
    ]
    done = subprocess.run(
        [BATON, "demo", "quickstart", *changes, "--store", str(tmp_path / "store")],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "SIGKILL at step 4" in done.stderr
    assert "SIGKILL at step 10" in done.stderr
    assert "resumed 2 times; final digest equals the undisturbed run's" in done.stdout
    assert re.search(r"loss +[\d.]+ \[[\d.]+, [\d.]+\] → [\d.]+ \[", done.stdout)
    assert re.search(r"trained in \d+ s undisturbed, at most [\d.]+ GiB", done.stdout)
