"""A recipe reaches Kubeflow: by the real `kfp` command, and by `baton submit`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
QUICKSTART = Path(__file__).parents[2] / "pipelines/recipes/quickstart.yaml"


def _command(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": str(cwd)}
    return subprocess.run(
        [str(BIN / name), *arguments], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


def test_the_compiled_recipe_is_taken_by_kfp_run_submit(kfp_api: Any, tmp_path: Path) -> None:
    package = tmp_path / "quickstart.yaml"
    assert _command("baton", "compile", str(QUICKSTART), "-o", str(package), cwd=tmp_path).returncode == 0
    done = _command(
        "kfp", "--endpoint", kfp_api.url, "run", "submit", "-e", "trials", "-r", "first", "-f", str(package),
        "run_name=first", "store=s3://baton", "learning_rate=0.001", "max_steps=80",
        'overrides={"training.weight_decay": 0.5}', cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = kfp_api.runs.values()
    assert run["runtime_config"]["parameters"] == {
        "run_name": "first", "store": "s3://baton", "learning_rate": 0.001, "max_steps": 80,
        "overrides": {"training.weight_decay": 0.5},
    }  # fmt: skip


def test_submit_to_nobody_is_one_message(tmp_path: Path) -> None:
    done = _command("baton", "submit", str(QUICKSTART), "--endpoint", "http://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode != 0
    assert "http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_planted_credentials_are_nowhere_in_the_compiled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "planted-key")
    package = tmp_path / "p.yaml"
    arguments = [str(QUICKSTART), "-o", str(package), "--store", "s3://baton", "--set", "resources.secret=s3-keys"]
    assert _command("baton", "compile", *arguments, cwd=tmp_path).returncode == 0
    assert "planted" not in package.read_text()
    assert "s3-keys" in package.read_text()
