"""A gate in the pipeline: a condition that a person sees, a run that ends as rejected, and no export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.runs.run import Run
from baton.store.storage import Storage

RECIPE = Path(__file__).parents[1] / "recipes/scratch.yaml"
BATON = str(Path(sys.executable).parent / "baton")
REFUSED = 'evaluation.gate={perplexity: "<= baseline * 0.01", loss: "< 100"}'
PASSED = 'evaluation.gate={perplexity: "<= baseline"}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate")


def _run(folder: Path, gate: str) -> tuple[int, dict[str, Any]]:
    command = [BATON, "run", str(RECIPE), "--run", "gated", "--store", str(folder / "store"), "--output", "json"]
    settings = [gate, "training.epochs=null", "training.max_steps=4", f"tracking.mlflow=sqlite:///{folder}/mlflow.db"]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def refused(folder: Path) -> tuple[int, dict[str, Any]]:
    return _run(folder, REFUSED)


def _verdict(folder: Path, run: Run) -> str:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    return client.get_run(run.require("tracking.json")["run_id"]).data.tags["baton.verdict"]


@pytest.mark.slow
def test_a_run_that_fails_is_rejected_and_exports_nothing(folder: Path, refused: tuple[int, dict[str, Any]]) -> None:
    code, found = refused
    assert (code, found["state"], found["model_uri"]) == (3, "rejected", None)
    assert {line["figure"]: line["held"] for line in found["gate"]} == {"loss": True, "perplexity": False}
    run = Run(Storage(str(folder / "store")), "gated")
    assert run.raw("export.json") is None
    page = Path(found["report_uri"]).read_text(encoding="utf-8")
    assert "The gate rejects the model, and nothing was exported: perplexity " in page
    assert _verdict(folder, run).startswith("rejected: perplexity ")


@pytest.mark.slow
def test_another_gate_lets_it_through(folder: Path, refused: tuple[int, dict[str, Any]]) -> None:
    run = Run(Storage(str(folder / "store")), "gated")
    assert refused[1]["model_uri"] is None
    code, found = _run(folder, PASSED)
    assert (code, found["state"]) == (0, "succeeded")
    assert found["model_uri"] == run.require("export.json")["model_uri"]
    assert _verdict(folder, run) == "accepted"


def test_the_condition_is_in_the_compiled_file(tmp_path: Path) -> None:
    package = tmp_path / "pipeline.yaml"
    done = subprocess.run(
        [BATON, "compile", str(RECIPE), "-o", str(package), "--set", PASSED],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pipeline = next(yaml.safe_load_all(package.read_text(encoding="utf-8")))
    branches = pipeline["components"]["comp-condition-branches-1"]["dag"]["tasks"]
    conditions = {task["taskInfo"]["name"]: task["triggerPolicy"]["condition"] for task in branches.values()}
    verdict = "inputs.parameter_values['pipelinechannel--gate-verdict'] == 'accepted'"
    assert conditions == {"accepted": verdict, "rejected": f"!({verdict})"}
    report = pipeline["root"]["dag"]["tasks"]["report"]
    assert "condition-branches-1" in report["dependentTasks"]
