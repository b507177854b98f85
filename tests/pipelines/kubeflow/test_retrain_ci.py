"""CI and events: the files parse, and their shell steps run against a Kubeflow Pipelines API."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.components.retrain import outcome
from baton.components.shared.core.events import GateLine, Retraining
from baton.components.shared.runs.run import now
from baton.components.shared.store.storage import Storage
from tests.pipelines.kfp_api import RawAnswer
from tests.pipelines.kfp_schedules import ScheduleApi

ROOT = Path(__file__).parents[3]
GATE: list[GateLine] = [{"words": "loss 2 is <= production = 2.1", "held": True}]
COMMENT = """\
### Retraining of again: promoted

model 2 of again

held-out loss 3 → 2

| gate | held |
|---|---|
| loss 2 is <= production = 2.1 | yes |

- run: `s3://baton/runs/again-1`
- model: `s3://baton/runs/again-1/export/1`
- report: `s3://baton/runs/again-1/report.html`
"""


class Backend(ScheduleApi):
    """An API whose runs leave in the store what a retraining leaves."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self.state = "promoted"
        self.interfere = lambda method, path: self._leave(store, path)

    def _leave(self, store: str, path: str) -> RawAnswer | None:
        run = path.rpartition("/")[2]
        if run in self.runs:
            links = {"run_uri": "", "report_uri": "/report.html", "model_uri": "/export/1"}
            known = {name: f"s3://baton/runs/again-1{end}" for name, end in links.items()}
            came_to = Retraining(
                self.state,
                "model 2 of again",
                now(),
                run="again-1",
                summary="held-out loss 3 → 2",
                gate=GATE,
                **known,
            )
            outcome.keep(Storage(store), "again", run, came_to)
        return None


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    for name in ("KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT", "KF_PIPELINES_IAP_OAUTH2_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with Backend(str(tmp_path / "store")) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a recipe, and programs in place of those that reach out."""
    document = {
        "name": "again",
        "store": str(tmp_path / "store"),
        "model": {"base": "org/model"},
        "data": {"source": "builtin:stdlib-docs"},
        "evaluation": {"production": "accepted", "gate": {"loss": "<= production"}},
        "tracking": {"mlflow": None},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    for name in ("gh", "curl", "pip"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> "$CALLS"\n', encoding="utf-8")
        program.chmod(0o755)
    return tmp_path


def _shell(folder: Path, backend: Backend, script: str, **values: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RECIPE": "recipe.yaml",
        "BATON_KFP_ENDPOINT": backend.url,
        "CALLS": str(folder / "calls"),
        **values,
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


@pytest.mark.slow
def test_the_plain_script(folder: Path, backend: Backend) -> None:
    done = _shell(folder, backend, str(ROOT / "examples/ci/retrain.sh"))
    assert done.returncode == 0, done.stderr
    assert (folder / "comment.md").read_text(encoding="utf-8") == COMMENT
    (run,) = backend.runs.values()
    posted = backend.spec(run)
    assert posted.get("pipeline_spec", posted)["pipelineInfo"]["name"] == "again-retrain"
    given = {"store": str(folder / "store"), "source": "", "base_model": "org/model", "seed": 0, "batch_size": 8}
    assert run["runtime_config"]["parameters"] == {**given, "overrides": {}}


@pytest.mark.slow
def test_a_model_that_is_rejected_ends_the_script_with_3_and_is_told(folder: Path, backend: Backend) -> None:
    backend.state = "rejected"
    done = _shell(folder, backend, str(ROOT / "examples/ci/retrain.sh"))
    assert done.returncode == 3, done.stderr
    assert "### Retraining of again: rejected, the model in use stays" in done.stdout


def _workflow() -> tuple[dict[Any, Any], list[dict[str, str]]]:
    """Returns the GitHub workflow, and its steps that run something."""
    found = yaml.safe_load((ROOT / ".github/workflows/retrain.yml").read_text(encoding="utf-8"))
    return found, [step for job in ("check", "retrain") for step in found["jobs"][job]["steps"] if "run" in step]


def test_a_pull_request_is_checked_alone_and_no_input_becomes_shell_code() -> None:
    workflow, steps = _workflow()
    triggers = workflow[True]  # what YAML 1.1 makes of `on`
    assert set(triggers) == {"workflow_call", "workflow_dispatch"}
    assert workflow["jobs"]["retrain"]["if"] == "github.event_name != 'pull_request'"
    assert workflow["jobs"]["retrain"]["concurrency"]["cancel-in-progress"] is False
    assert len(steps) == 6
    assert not [step["name"] for step in steps if "${{" in step["run"]]


@pytest.mark.slow
def test_the_steps_of_the_github_workflow(folder: Path, backend: Backend) -> None:
    values = {"BATON": "baton", "GITHUB_REPOSITORY": "me/mine", "GITHUB_SHA": "0123", "AWS_ENDPOINT_URL": ""}
    for step in _workflow()[1]:
        done = _shell(folder, backend, step["run"], GITHUB_STEP_SUMMARY=str(folder / "summary"), **values)
        assert done.returncode == 0, (step["name"], done.stderr)
    assert (folder / "summary").read_text(encoding="utf-8") == COMMENT
    calls = (folder / "calls").read_text(encoding="utf-8").splitlines()
    assert calls[-5:] == ["gh", "api", "repos/me/mine/commits/0123/comments", "--field", "body=@comment.md"]


@pytest.mark.slow
def test_the_steps_of_gitlab_ci(folder: Path, backend: Backend) -> None:
    jobs = yaml.safe_load((ROOT / "examples/ci/gitlab-ci.yml").read_text(encoding="utf-8"))
    api = "https://gitlab.test/api/v4"
    values = {"GITLAB_TOKEN": "t", "CI_API_V4_URL": api, "CI_PROJECT_ID": "7", "CI_COMMIT_SHA": "0123"}
    for name in ("check", "retrain"):
        done = _shell(folder, backend, "\n".join(jobs[name]["script"]), **values)
        assert done.returncode == 0, done.stderr
    done = _shell(folder, backend, "\n".join(jobs["retrain"]["after_script"]), **values)
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text(encoding="utf-8").splitlines()
    assert calls[-1] == f"{api}/projects/7/repository/commits/0123/comments"
    assert "note@comment.md" in calls
    assert jobs["retrain"]["resource_group"] == "retrain"


def test_an_outcome_that_is_not_there_is_one_message(folder: Path, backend: Backend) -> None:
    done = _shell(folder, backend, "baton outcome recipe.yaml --id 0123")
    assert done.returncode == 2
    assert "outcomes/0123.json does not exist; expected what retraining '0123' came to." in done.stderr


def test_an_object_that_arrives_starts_the_uploaded_pipeline(folder: Path, backend: Backend) -> None:
    source = yaml.safe_load((ROOT / "examples/argo-events/event-source.yml").read_text(encoding="utf-8"))
    sensor = yaml.safe_load((ROOT / "examples/argo-events/sensor.yml").read_text(encoding="utf-8"))
    assert (source["kind"], sensor["kind"]) == ("EventSource", "Sensor")
    (dependency,) = sensor["spec"]["dependencies"]
    assert dependency["eventSourceName"] == source["metadata"]["name"]
    assert dependency["eventName"] in source["spec"]["minio"]

    done = _shell(
        folder, backend,
        'baton compile "$RECIPE" --pipeline retrain --output p.yaml && '
        'kfp --endpoint "$BATON_KFP_ENDPOINT" --output json pipeline create --pipeline-name again-retrain p.yaml',
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (pipeline,) = backend.registry.pipelines
    trigger = sensor["spec"]["triggers"][0]["template"]["http"]
    event = {"notification": [{"s3": {"object": {"key": "again/manifest.json"}}}]}
    body = json.dumps(_payload(trigger["payload"], dependency["name"], event)).replace("PIPELINE_ID", pipeline)
    path = trigger["url"].partition(":8888")[2]
    request = urllib.request.Request(
        backend.url + path, body.encode(), headers=trigger["headers"], method=trigger["method"]
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        made = json.load(answer)
    assert made["display_name"] == "retrain-again again/manifest.json"
    assert uuid.UUID(made["run_id"])


def _payload(parameters: list[dict[str, Any]], name: str, event: dict[str, Any]) -> dict[str, Any]:
    """Makes the body of a request as Argo Events does: a template over the event, else the value; paths by dots."""
    made: dict[str, Any] = {}
    for parameter in parameters:
        source = parameter["src"]
        assert source["dependencyName"] == name
        value = source["value"]
        if "dataTemplate" in source:
            key = event["notification"][0]["s3"]["object"]["key"]
            value, count = re.subn(
                r"\{\{ \(index \.Input\.notification 0\)\.s3\.object\.key \}\}", key, source["dataTemplate"]
            )
            assert count == 1
        *parents, last = parameter["dest"].split(".")
        node = made
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return made
