"""A run that fails in the local engine leaves why, with a page that says so; resumed, it is as if nothing had been."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest

from baton.recipe import load
from baton.runs.documents import TrackingRun
from baton.runs.outcomes import RunFailure
from baton.runs.run import Run
from baton.store.storage import Storage

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[1] / "recipes/scratch.yaml"
BATON = str(Path(sys.executable).parent / "baton")
HOOKS = """\
from pathlib import Path
from transformers import TrainerCallback


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 4 and Path({path!r}).exists():
            raise ValueError("the <b>license</b> of the rows has run out")
"""


@dataclass(frozen=True)
class Training:
    """A run whose second chunk fails as long as a file is there."""

    folder: Path

    @property
    def run(self) -> Run:
        return Run(Storage(str(self.folder / "store")), "fails")

    @property
    def page(self) -> str:
        return re.sub(r"\s+", " ", Path(self.run.uri, "report.html").read_text())

    def start(self, *settings: str) -> tuple[int, str]:
        """Runs it, again where it was."""
        command = [BATON, "run", str(RECIPE), "--run", "fails", "--store", str(self.folder / "store")]
        given = ["training.epochs=null", "training.max_steps=6", "chunks.count=3"]
        given += [f"tracking.mlflow=sqlite:///{self.folder}/mlflow.db", f"hooks.source={self.folder}/own.py"]
        given += ["hooks.callbacks=[{use: 'own:Stops'}]", *settings]
        words = [word for setting in given for word in ("--set", setting)]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def tracked(self) -> Any:
        client = mlflow.MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        return client, client.get_run(self.run.need(TrackingRun).run_id)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, int, str]:
    folder = tmp_path_factory.mktemp("failed")
    (folder / "stops").touch()
    (folder / "own.py").write_text(HOOKS.format(path=str(folder / "stops")))
    training = Training(folder)
    return training, *training.start()


def test_a_stage_that_fails_leaves_why(failed: tuple[Training, int, str]) -> None:
    training, code, said = failed
    assert code == 1, said
    failure = training.run.need(RunFailure)
    assert (failure.stage, failure.exit_code, failure.is_cancelled) == ("train chunk 2", 1, False)
    assert failure.message == (
        "ValueError: the <b>license</b> of the rows has run out (own.py, line 8, in Stops.on_step_end)"
    )
    assert failure.at


def test_the_page_of_a_run_that_failed_says_why(failed: tuple[Training, int, str]) -> None:
    training, _, _ = failed
    page = training.page
    assert "Why it failed" in page
    assert "The run failed in train chunk 2, at step 2 of 6." in page
    assert "the &lt;b&gt;license&lt;/b&gt; of the rows has run out" in page
    assert "<b>license</b>" not in page
    assert "the run resumes from its checkpoint of step 2" in page
    assert 'aria-label="Resume proof by checkpoint"' in page, "with what there is"


def test_the_tracking_run_of_a_run_that_failed_is_closed(failed: tuple[Training, int, str]) -> None:
    client, tracked = failed[0].tracked()
    assert tracked.info.status == "FAILED"
    assert "report.html" in [artifact.path for artifact in client.list_artifacts(tracked.info.run_id)]


def test_a_page_is_left_also_where_the_run_cannot_be_read(failed: tuple[Training, int, str]) -> None:
    """What a stage has failed of may be a document of the run."""
    training, _, _ = failed
    plan = Path(training.run.uri, "plan.json")
    before = plan.read_text()
    plan.write_text("{")
    given = json.dumps(RunFailure(stage="train chunk 2", message="plan.json is not a JSON object.", at="").to_json())
    command = [sys.executable, "-m", "baton.pages.publish", training.run.uri]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "plan.json is not a JSON object." in training.page
    finally:
        plan.write_text(before)


def test_a_run_that_resumes_forgets_that_it_failed(failed: tuple[Training, int, str]) -> None:
    training, _, _ = failed
    (training.folder / "stops").unlink()
    code, said = training.start()
    assert code == 0, said
    assert training.run.read(RunFailure) is None
    assert "Why it failed" not in training.page
    assert training.tracked()[1].info.status == "FINISHED"
    assert [attempt.outcome for attempt in training.run.attempts(2)] == ["done"]


def _executed(room: str, inputs: dict[str, Any]) -> Any:
    """Runs a stage as its container does."""
    given = {"inputs": {"parameterValues": inputs}, "outputs": {"outputFile": "/dev/null"}}
    command = [sys.executable, "-m", "baton.kfp.executor", room, "1", "--function_to_execute", room]
    command += ["--executor_input", json.dumps(given)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_data_split_that_fails_tells_a_run_that_is_there(failed: tuple[Training, int, str]) -> None:
    training, _, _ = failed
    inputs = {"recipe": load.dumps(training.run.recipe()), "store": str(training.folder / "store")}
    inputs |= {"source": "/nowhere/rows.jsonl", "new_name": "new", "job_id": "1", "phase": "", "start_from": ""}
    inputs |= {"base_model": "", "seed": 11, "batch_size": 8, "overrides": {}}
    inputs |= {"learning_rate": 0.01, "epochs": 0, "max_steps": 6}
    for changes in ({"run_name": "fails"}, {"run_name": ""}, {"run_name": "", "learning_rate": 0.5}):
        done = _executed("data_split", inputs | changes)
        assert done.returncode == 2, done.stderr
    assert "run 'new-1' was started with another recipe: training.learning_rate" in done.stderr
    failure = Run(training.run.storage, "new-1").need(RunFailure)
    assert (failure.stage, failure.exit_code) == ("data split", 2)
    assert "/nowhere/rows.jsonl" in failure.message, "what another recipe fails of is not this run's"
    assert failure.remedy
    assert training.run.read(RunFailure) is None, "it has come to its end"
    assert "Why it failed" not in training.page


def test_a_store_that_is_away_hides_no_error_and_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage ends on its own error, soon."""
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("BATON_STORE_PATIENCE", "1")
    began = time.monotonic()
    done = _executed("tokenize", {"baton": "s3://away/runs/gone"})
    assert done.returncode == 2
    assert "store 's3://away'" in done.stderr
    assert "why the run failed could not be kept: " in done.stderr
    assert time.monotonic() - began < 45
