"""Folders called `components` and `pipelines`, as Kubeflow users have them, are not in Baton's way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / "tests" / "recipes" / "scratch.yaml"


@pytest.fixture
def their_project(tmp_path: Path) -> Path:
    """A folder with packages of these names, each of which ends what imports it."""
    for name in ("components", "pipelines", "components/tokenize"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('theirs was imported')\n")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "BATON_FORKSERVER": "0"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_theirs_would_be_imported(their_project: Path) -> None:
    done = run(their_project, sys.executable, "-c", "import components")
    assert (done.returncode, done.stderr.strip()) == (1, "theirs was imported")


def test_a_pipeline_is_compiled_beside_them(their_project: Path) -> None:
    done = run(their_project, sys.executable, "-m", "baton", "compile", str(SCRATCH), "-o", "pipeline.yaml")
    assert done.returncode == 0, done.stderr
    specification = next(yaml.safe_load_all((their_project / "pipeline.yaml").read_text(encoding="utf-8")))
    (chunk,) = [
        executor["container"]
        for name, executor in specification["deploymentSpec"]["executors"].items()
        if name == "exec-train-chunk"
    ]
    assert chunk["command"][1:4] == ["-m", "baton.kfp.executor", "train_chunk"]


def test_a_stage_runs_beside_them(their_project: Path) -> None:
    """By the engine's own entry, as in a pod; it gets as far as looking for its run."""
    code = f"""
from kfp import local
from baton.components.gate.component import reject
local.init(local.SubprocessRunner(use_venv=False), pipeline_root={str(their_project / "root")!r})
reject(baton={str(their_project / "runs" / "r")!r})
"""
    done = run(their_project, sys.executable, "-c", code)
    assert "theirs was imported" not in done.stdout + done.stderr
    assert "stage stage=rejected state=started" in done.stdout + done.stderr
