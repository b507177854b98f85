"""`baton run`: the compiled pipeline on the real local engine, from rows to an exported model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.store.sources import BUILTIN
from tests.support.pages import read

RECIPES = Path(__file__).parents[1] / "recipes"
GSM8K = Path(__file__).parents[1] / "assets/real/questions.jsonl.gz"
BATON = str(Path(sys.executable).parent / "baton")


def _baton(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "BATON_CACHE": str(cwd / "cache")}
    return subprocess.run([BATON, *arguments], capture_output=True, text=True, cwd=cwd, env=given, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A finished run: its working folder, the JSON it printed, and what it showed."""
    folder = tmp_path_factory.mktemp("gsm8k")
    done = _run(folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    settings = [f"data.source={GSM8K}", f"tracking.mlflow=sqlite:///{folder}/mlflow.db"]
    return _baton(
        "run", str(RECIPES / "gsm8k.yaml"), "--run", "gsm", "--store", str(folder / "store"), "--output", "json",
        *(word for setting in settings for word in ("--set", setting)), cwd=folder,
    )  # fmt: skip


@pytest.mark.slow
def test_eval_loss_falls_on_gsm8k(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = finished
    assert found["state"] == "succeeded"
    assert found["steps"] == 40
    assert [checkpoint["step"] for checkpoint in found["checkpoints"]] == [20, 40]
    assert found["metrics"]["eval_loss_after"] < found["metrics"]["eval_loss_before"] - 1


@pytest.mark.slow
def test_the_log_has_the_steps_and_nothing_of_the_engine(finished: tuple[Path, dict[str, Any], str]) -> None:
    log = (finished[0] / "cache" / "logs" / "gsm.log").read_text()
    assert [int(step) for step in re.findall(r" step step=(\d+) of=40 loss=\d", log)] == list(range(1, 41))
    assert re.search(r"^[\d: -]{19} run gsm$", log, re.M)
    for foreign in ("a fresh interpreter", " - INFO - ", "metadata={", "\x1b", "it/s"):
        assert foreign not in log


@pytest.mark.slow
def test_progress_goes_to_standard_error_stage_by_stage(finished: tuple[Path, dict[str, Any], str]) -> None:
    lines = [line for line in finished[2].splitlines() if line.startswith("✓")]
    stages = [re.sub(r" \(.*", "", line.removeprefix("✓ ")) for line in lines]
    expected = {"data split", "tokenize", "evaluate"}
    expected |= {f"{kind} {number} of 2" for kind in ("train chunk", "checkpoint") for number in (1, 2)}
    assert len(stages) == 9
    assert set(stages) == expected | {"export", "report"}
    assert re.search(r"✓ train chunk 2 of 2 \(.*\) step 40/40, loss .*, step 40 saved", " ".join(finished[2].split()))


@pytest.mark.slow
def test_the_report_shows_the_run(finished: tuple[Path, dict[str, Any], str]) -> None:
    page = Path(finished[1]["report_uri"]).read_text()
    assert "Eval loss fell" in page
    assert "the resume from chunk to chunk was bit-identical" in page
    assert "not verified yet" not in page
    assert finished[1]["checkpoints"][-1]["digest"] in page
    assert "evaluation" in read(page).curves("loss")


@pytest.mark.slow
def test_the_exported_model_writes(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = finished
    done = _baton("generate", found["model_uri"], "--prompt", "Natalia sold", "--max-new-tokens", "8", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    again = _baton("generate", found["model_uri"], "--prompt", "Natalia sold", "--max-new-tokens", "8", cwd=folder)
    assert again.stdout == done.stdout


@pytest.mark.slow
def test_steps_run_on_in_one_mlflow_run(finished: tuple[Path, dict[str, Any], str]) -> None:
    import sqlite3

    database = sqlite3.connect(finished[0] / "mlflow.db")
    runs = database.execute("select name, status from runs").fetchall()
    steps = database.execute("select step from metrics where key = 'loss' order by step").fetchall()
    keys = {key for (key,) in database.execute("select distinct key from metrics")}
    assert runs == [("gsm", "FINISHED")]
    assert [step for (step,) in steps] == list(range(1, 41))
    assert {"final_after_loss", "learning_rate", "grad_norm"} <= keys


@pytest.mark.slow
def test_the_same_command_again_trains_nothing(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = finished
    before = sorted(path for path in (folder / "store").rglob("*") if "checkpoints" in path.parts)
    done = _run(folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoints"] == found["checkpoints"]
    assert done.stderr.count("done before: step") == 2
    assert sorted(path for path in (folder / "store").rglob("*") if "checkpoints" in path.parts) == before


@pytest.mark.slow
def test_checkpoints_are_listed_shown_and_verified(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = finished
    listed = json.loads(_baton("checkpoints", "list", found["run_uri"], "--output", "json", cwd=folder).stdout)
    assert [row["digest"] for row in listed["checkpoints"]] == [row["digest"] for row in found["checkpoints"]]
    shown = json.loads(_baton("checkpoints", "show", found["run_uri"], "--output", "json", cwd=folder).stdout)
    assert shown["meta"]["parent"] == {"step": 20, "digest": found["checkpoints"][0]["digest"]}
    assert _baton("checkpoints", "verify", found["run_uri"], cwd=folder).returncode == 0
    damaged = Path(found["checkpoints"][0]["uri"]) / "model.safetensors"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    verified = _baton("checkpoints", "verify", found["run_uri"], "--output", "json", cwd=folder)
    damaged.write_bytes(data)
    assert verified.returncode == 1
    rows = json.loads(verified.stdout)["checkpoints"]
    assert [row["ok"] for row in rows] == [False, True]
    assert "model.safetensors" in rows[0]["problems"][0]


def _prove(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    settings = ["--store", str(folder / "store"), "--chunks", "1,2", "--output", "json"]
    settings += ["--set", "training.max_steps=4", "--set", "training.epochs=null", "--set", f"data.source={BUILTIN}"]
    return _baton("prove", str(RECIPES / "scratch.yaml"), *settings, *more, cwd=folder)


@pytest.mark.slow
def test_prove_is_exact(tmp_path: Path) -> None:
    done = _prove(tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["exact"] is True
    assert found["first_difference"] is None
    assert [variant["chunks"] for variant in found["variants"]] == [1, 2]
    assert [len(variant["losses"]) for variant in found["variants"]] == [4, 4]
    assert [variant["targets"] for variant in found["variants"]] == [[4], [2, 4]]
    weights = [next(Path(variant["uri"]).glob("**/step-00000004/*/model.safetensors")) for variant in found["variants"]]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]
    assert [variant["weights_sha256"] for variant in found["variants"]] == digests
    assert found["report"] == str(tmp_path / "store/pages/prove-scratch.html")
    assert "exact: all 2 runs are the same, byte for byte" in Path(found["report"]).read_text()


@pytest.mark.slow
def test_prove_without_the_random_state_is_not_exact(tmp_path: Path) -> None:
    done = _prove(tmp_path, "--leave-out", "rng", "--report", "control.html")
    assert done.returncode == 0, "a control is to find a difference"
    found = json.loads(done.stdout)
    assert found["exact"] is False
    assert found["first_difference"]["what"] == "loss"
    assert found["first_difference"]["logged_value"] == 3
    page = (tmp_path / "control.html").read_text()
    assert "NOT exact: 1 of 2 runs differs" in page
    assert repr(found["first_difference"]["found"]) in page
