"""CI and events: the files parse, and their shell steps run against a Kubeflow Pipelines API."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import typer
import yaml

from baton import retrain
from baton.cli.app import app
from baton.events import Retraining
from baton.runs.outcomes import EvaluationResult, ReportPage
from baton.runs.run import Run, now
from baton.store.storage import Storage
from tests.support.kfp_schedules import ScheduleApi

ROOT = Path(__file__).parents[2]
GATE: list[dict[str, Any]] = [{"words": "loss 2 is <= production = 2.1", "held": True}]
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
    """An API whose runs end at once, and leave in the store what a retraining leaves: `state`, or nothing."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self.store = store
        self.state: str | None = "promoted"

    def _create_run(self, run: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = super()._create_run(run)
        self.runs[made["run_id"]].update(state=self.final_state, _states=[])
        if self.state:
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
            retrain.keep_outcome(Storage(self.store), "again", made["run_id"], came_to)
        return made

    @property
    def page(self) -> str:
        """Address of the page of its newest run."""
        return f"{self.url}/#/runs/details/{list(self.runs)[-1]}"

    @property
    def comment(self) -> str:
        """What is to be said of a retraining that was promoted."""
        return f"{COMMENT}- Kubeflow: {self.page}\n"

    def fails(self, message: str) -> None:
        """Lets runs fail in their second chunk, before any stage has left a word in the store."""
        self.state, self.final_state, self.stops_at = None, "FAILED", "train-chunk-2"
        self.messages = {"train-chunk-2": message}


class GitLab:
    """The part of GitLab's API that knows merge requests and takes notes.

    Attributes:
        requests: Numbers of the merge requests of every commit.
        notes: Path, token and fields of each request that wrote something.
    """

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.notes: list[tuple[str, str | None, dict[str, list[str]]]] = []
        gitlab = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer([{"iid": number} for number in gitlab.requests])

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                gitlab.notes.append((self.path, self.headers["PRIVATE-TOKEN"], parse_qs(body)))
                self._answer({})

            def _answer(self, document: object) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/api/v4"

    def __enter__(self) -> GitLab:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    for name in ("KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT", "KF_PIPELINES_IAP_OAUTH2_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with Backend(str(tmp_path / "store")) as running:
        yield running


@pytest.fixture
def gitlab() -> Iterator[GitLab]:
    with GitLab() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a recipe, and programs in place of those that reach out."""
    document = {
        "name": "again",
        "store": str(tmp_path / "store"),
        "model": {"base": "org/model"},
        "data": {"source": "builtin:stdlib-docs"},
        "chunks": {"count": 2},
        "evaluation": {"production": "accepted", "gate": {"loss": "<= production"}},
        "tracking": {"mlflow": None},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    programs = {"gh": 'case "$2" in */pulls) echo "$PULL_REQUEST";; esac', "pip": ""}
    for name, answer in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> "$CALLS"\n{answer}\n', encoding="utf-8")
        program.chmod(0o755)
    return tmp_path


def _shell(folder: Path, backend: Backend, script: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Runs a step as GitHub does, and GitLab's shell: empty is what a variable is that is not set there."""
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BATON_RECIPE": "recipe.yaml",
        "BATON_PIPELINE": "retrain",
        "BATON_PACKAGE": "baton",
        "BATON_KFP_ENDPOINT": backend.url,
        **dict.fromkeys(("BATON_KFP_TOKEN", "BATON_NAMESPACE", "BATON_IMAGE"), ""),
        **dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ""),
        "CALLS": str(folder / "calls"),
        "PULL_REQUEST": "",
        **values,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


GITHUB, GITLAB, PLAIN = (ROOT / "examples/ci" / name for name in ("github.yml", "gitlab.yml", "retrain.sh"))
CI = {"GITHUB_REPOSITORY": "me/mine", "GITHUB_SHA": "0123"}


def _github() -> tuple[dict[Any, Any], dict[str, str]]:
    """Returns the GitHub workflow, and its steps that run something, by job and name."""
    found = yaml.safe_load(GITHUB.read_text(encoding="utf-8"))
    jobs = found["jobs"].items()
    return found, {f"{job}: {s['name']}": s["run"] for job, body in jobs for s in body["steps"] if "run" in s}


def _gitlab() -> dict[str, str]:
    """Returns the scripts of GitLab's jobs, by job and part."""
    jobs = yaml.safe_load(GITLAB.read_text(encoding="utf-8"))
    parts = ("script", "after_script")
    return {
        f"{job}: {part}": "\n".join(jobs[job][part])
        for job in ("check", "retrain")
        for part in parts
        if part in jobs[job]
    }


SCRIPTS = {
    **{f"github {name}": script for name, script in _github()[1].items()},
    **{f"gitlab {name}": script for name, script in _gitlab().items()},
    "plain": PLAIN.read_text(encoding="utf-8"),
}
"""Every script there is, by its file and place."""


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_are_shell_and_what_they_ask_of_baton_exists(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    monkeypatch.setenv("BATON_KFP_ENDPOINT", "http://kfp.test")
    for command in _commands(script):
        _parse(command)


def _commands(script: str) -> list[list[str]]:
    """Returns the words of each call of `baton`, variables put in as a shell does."""
    lines = re.sub(r"\\\n|(?<=\S)\n(?= *--)", " ", script).splitlines()
    calls = [line.strip() for line in lines if line.strip().startswith("baton ")]
    plain = [re.split(r" (?:>|\|\|) ", call)[0] for call in calls]
    words = [re.sub(r"\$\{BATON_NAMESPACE:\+([^}]*)\}", r"\1", call) for call in plain]
    known = {"BATON_PIPELINE": "retrain", "pipeline": "retrain"}
    return [shlex.split(re.sub(r"\$(\w+)", lambda name: known.get(name[1], "x"), call))[1:] for call in words]


def _parse(words: list[str]) -> None:
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:])


def test_an_option_that_does_not_exist_is_seen() -> None:
    (command,) = _commands('if true; then\n  baton ci-report "$x" \\\n  --resul f > y || z\nfi\n')
    assert command == ["ci-report", "x", "--resul", "f"]
    with pytest.raises(Exception, match="No such option: --resul"):
        _parse(command)
    assert sum(len(_commands(script)) for script in SCRIPTS.values()) == 12


@pytest.mark.parametrize("path", [GITHUB, GITLAB, PLAIN], ids=lambda path: path.name)
def test_all_that_is_used_is_explained_at_the_top_and_nothing_else_is_to_be_found_out(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    top = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    body = text[len(top) :]
    used = set(re.findall(r"(?:vars|secrets)\.(\w+)", body)) | set(re.findall(r"\b(?:BATON_\w+|GITLAB_TOKEN)", body))
    assert used >= {"BATON_KFP_ENDPOINT", "BATON_RECIPE", "BATON_PIPELINE", "BATON_NAMESPACE"}
    assert used == {name for name in used if name in top}
    assert not re.search(r"OWNER|COMMIT[^_]|TODO|<[a-z]+>|example\.(com|org)", text.replace("CI_COMMIT_", ""))


def test_who_writes_and_no_input_becomes_shell_code() -> None:
    workflow, steps = _github()
    triggers = workflow[True]  # what YAML 1.1 makes of `on`
    assert set(triggers) == {"push", "pull_request", "workflow_dispatch"}
    check, retrain = workflow["jobs"]["check"], workflow["jobs"]["retrain"]
    assert "pull_request" not in retrain["if"]
    assert "default_branch" in retrain["if"]
    assert "head.repo.full_name == github.repository" in check["if"]
    assert "secrets" not in yaml.safe_dump(check) + yaml.safe_dump(workflow["env"])
    assert workflow["permissions"] == {"contents": "read"}
    assert retrain["concurrency"]["cancel-in-progress"] is False
    assert yaml.safe_load(GITLAB.read_text(encoding="utf-8"))["retrain"]["resource_group"] == "retrain"
    assert len(steps) == 7
    assert not [name for name, run in steps.items() if "${{" in run]


@pytest.mark.parametrize("script", ["github check: variables", "gitlab check: script"])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"BATON_PACKAGE": "", "BATON_KFP_ENDPOINT": ""}, "has no variable BATON_PACKAGE BATON_KFP_ENDPOINT; the top"),
        ({"BATON_KFP_ENDPOINT": ""}, "has no variable BATON_KFP_ENDPOINT; the top"),
        ({"BATON_RECIPE": "absent.yaml"}, "BATON_RECIPE: there is no file 'absent.yaml'"),
    ],
    ids=["two", "one", "recipe"],
)
def test_what_is_missing_is_named_before_anything_is_fetched(
    script: str, values: dict[str, str], said: str, folder: Path, backend: Backend
) -> None:
    done = _shell(folder, backend, SCRIPTS[script], **{"GITLAB_TOKEN": "t", **values})
    assert done.returncode == 2
    assert said in done.stdout
    assert not (folder / "calls").exists()


def _in_github(folder: Path, backend: Backend, **values: str) -> tuple[int, list[str]]:
    """Runs the workflow, and returns how the step ended that trains, and what `gh` was last called with."""
    codes = {}
    for name, script in _github()[1].items():
        summary = str(folder / "summary")
        done = _shell(folder, backend, script, GITHUB_STEP_SUMMARY=summary, **CI, **values)
        codes[name] = done.returncode
        assert done.returncode == 0 or name == "retrain: retrain", (name, done.stderr, done.stdout)
    calls = (folder / "calls").read_text(encoding="utf-8").splitlines()
    assert calls[:3] == ["pip", "install", "baton"]
    return codes["retrain: retrain"], calls[-4:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_number", "place"), [("", "commits/0123"), ("12", "issues/12")], ids=["commit", "pull request"]
)
def test_github_says_what_was_promoted(request_number: str, place: str, folder: Path, backend: Backend) -> None:
    code, call = _in_github(folder, backend, PULL_REQUEST=request_number)
    assert code == 0
    assert call == ["api", f"repos/me/mine/{place}/comments", "--field", "body=@comment.md"]
    said = (folder / "comment.md").read_text(encoding="utf-8")
    assert said == (folder / "summary").read_text(encoding="utf-8") == backend.comment


@pytest.mark.slow
def test_github_says_what_was_rejected_and_the_job_ends_with_3(folder: Path, backend: Backend) -> None:
    backend.state = "rejected"
    assert _in_github(folder, backend)[0] == 3
    said = (folder / "summary").read_text(encoding="utf-8")
    assert said.startswith("### Retraining of again: rejected, the model in use stays\n")


@pytest.mark.slow
def test_github_says_why_a_run_failed_of_which_the_store_knows_nothing(folder: Path, backend: Backend) -> None:
    backend.fails("main: Error (exit code 1): `@all` <b>rows</b>\nmatch no file (baton exit code 2)")
    assert _in_github(folder, backend)[0] == 1
    said = (folder / "summary").read_text(encoding="utf-8")
    assert said == (
        "### Training of again: failed\n\n"
        "- train chunk 2: `'@all' <b>rows</b> match no file`\n\n"
        f"- Kubeflow: {backend.page}\n"
    )


@pytest.mark.slow
def test_github_starts_a_run_again_whose_pod_was_lost(folder: Path, backend: Backend) -> None:
    backend.fails("main: Error (exit code 137)")
    backend.retry_fails = True
    assert _in_github(folder, backend)[0] == 1
    assert len(backend.runs) == 4
    assert backend.page in (folder / "summary").read_text(encoding="utf-8")


@pytest.mark.slow
def test_github_says_that_the_endpoint_is_not_there(folder: Path, backend: Backend) -> None:
    assert _in_github(folder, backend, BATON_KFP_ENDPOINT=f"{backend.url}/nowhere")[0] == 2
    said = (folder / "summary").read_text(encoding="utf-8")
    assert said.startswith("### Training of again: not started\n\n")
    assert f"{backend.url}/nowhere" in said


@pytest.mark.slow
def test_a_training_without_a_judge_of_its_own_is_told_with_its_figures(folder: Path, backend: Backend) -> None:
    backend.state = None
    run = Run(Storage(str(folder / "store")), "again-ci")
    run.write(EvaluationResult(summary="held-out loss 3 → 2"))
    run.write(ReportPage(report_uri=f"{run.uri}/report.html"))
    script = SCRIPTS["github retrain: retrain"].replace("--wait", "--run again-ci --wait")
    done = _shell(folder, backend, script, BATON_PIPELINE="finetune")
    assert done.returncode == 0, done.stderr
    assert (folder / "comment.md").read_text(encoding="utf-8") == (
        "### Training of again: succeeded\n\nheld-out loss 3 → 2\n\n"
        f"- run: `{run.uri}`\n- report: `{run.uri}/report.html`\n- Kubeflow: {backend.page}\n"
    )


def _in_gitlab(folder: Path, backend: Backend, gitlab: GitLab) -> tuple[int, list[Any]]:
    """Runs the jobs, and returns how the one ended that trains, and what it wrote."""
    values = {"GITLAB_TOKEN": "t", "CI_API_V4_URL": gitlab.url, "CI_PROJECT_ID": "7", "CI_COMMIT_SHA": "0123"}
    done = {name: _shell(folder, backend, script, **values) for name, script in _gitlab().items()}
    for name in ("check: script", "retrain: after_script"):
        assert done[name].returncode == 0, done[name].stderr
    return done["retrain: script"].returncode, gitlab.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "place", "name"),
    [([], "repository/commits/0123/comments", "note"), ([12, 9], "merge_requests/12/notes", "body")],
    ids=["commit", "merge request"],
)
def test_gitlab_says_what_was_promoted(
    requests: list[int], place: str, name: str, folder: Path, backend: Backend, gitlab: GitLab
) -> None:
    gitlab.requests = requests
    code, notes = _in_gitlab(folder, backend, gitlab)
    assert code == 0
    assert notes == [(f"/api/v4/projects/7/{place}", "t", {name: [backend.comment]})]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["rejected", "failed"])
def test_gitlab_says_what_was_rejected_or_failed(ends: str, folder: Path, backend: Backend, gitlab: GitLab) -> None:
    if ends == "failed":
        backend.fails("main: Error (exit code 1): no rows (baton exit code 2)")
    else:
        backend.state = ends
    code, ((_, _, fields),) = _in_gitlab(folder, backend, gitlab)
    (said,) = fields["note"]
    assert code == {"rejected": 3, "failed": 1}[ends]
    assert said.startswith(f"### {'Training' if ends == 'failed' else 'Retraining'} of again: {ends}")


@pytest.mark.slow
def test_the_plain_script(folder: Path, backend: Backend) -> None:
    done = _shell(folder, backend, str(PLAIN))
    assert done.returncode == 0, done.stderr
    assert (folder / "comment.md").read_text(encoding="utf-8") == backend.comment
    (run,) = backend.runs.values()
    posted = backend.spec(run)
    assert posted.get("pipeline_spec", posted)["pipelineInfo"]["name"] == "again-retrain"
    given = {"store": str(folder / "store"), "source": "", "base_model": "org/model", "seed": 0, "batch_size": 8}
    assert run["runtime_config"]["parameters"] == given
    backend.state = "rejected"
    done = _shell(folder, backend, str(PLAIN))
    assert done.returncode == 3, done.stderr
    assert "### Retraining of again: rejected, the model in use stays" in done.stdout
    done = _shell(folder, backend, str(PLAIN), BATON_KFP_ENDPOINT="")
    assert "BATON_KFP_ENDPOINT: is not set" in done.stderr


def test_an_outcome_that_is_not_there_is_one_message(folder: Path, backend: Backend) -> None:
    done = _shell(folder, backend, "baton ci-report recipe.yaml --id 0123")
    assert done.returncode == 2
    assert "outcomes/0123.json does not exist; expected the result of retraining '0123'." in done.stderr


@pytest.mark.slow
def test_an_object_that_arrives_starts_the_uploaded_pipeline(folder: Path, backend: Backend) -> None:
    source = yaml.safe_load((ROOT / "examples/argo-events/event-source.yml").read_text(encoding="utf-8"))
    sensor = yaml.safe_load((ROOT / "examples/argo-events/sensor.yml").read_text(encoding="utf-8"))
    assert (source["kind"], sensor["kind"]) == ("EventSource", "Sensor")
    (dependency,) = sensor["spec"]["dependencies"]
    assert dependency["eventSourceName"] == source["metadata"]["name"]
    assert dependency["eventName"] in source["spec"]["minio"]

    done = _shell(
        folder, backend,
        'baton compile "$BATON_RECIPE" --pipeline retrain --output p.yaml && '
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
