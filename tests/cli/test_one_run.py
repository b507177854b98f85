"""Commands about one run: RUN as a name, a path or a URI; status, stop, retry, diff; a list that omits nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from baton import api, machine
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.cli import address, status
from baton.cli.app import app
from baton.cli.local import begun_by
from baton.cli.options import DEFAULT_STORE
from baton.errors import UserError
from baton.local import begun
from baton.pages.collect import collect
from baton.pages.run_page import render
from baton.recipe import load
from baton.runs import lineage
from baton.runs.documents import Progress, Restart, RunInfo
from baton.runs.outcomes import ExportedModel, RunFailure
from baton.runs.run import Run, iso, now
from baton.store.storage import Storage
from tests.support.pages import read

BATON = str(Path(sys.executable).parent / "baton")
RECIPES = Path(__file__).parents[1] / "recipes"
LOSSES = {1: 3.0, 2: 2.0, 3: 1.5, 4: 1.25}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """An empty store `store` in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    for name in ("BATON_KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return Storage(str(tmp_path / "store"))


def add(storage: Storage, name: str, *settings: str, losses: dict[int, float] = LOSSES, **meta: Any) -> Run:
    """Adds a run of four steps with checkpoints at steps 2 and 4, whose state follows from its losses."""
    import torch
    from safetensors.torch import save_file

    run = Run(storage, name)
    run.create(load.load(str(RECIPES / "scratch.yaml"), [f"store={storage.base_uri}", "chunks.count=2", *settings]))
    run.put("data.json", {"digest": "d", "rows": 45})
    run.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 4, "targets": [2, 4]})
    for step in (2, 4):
        local = Path("files", name, str(step))
        local.mkdir(parents=True)
        history = [{"step": at, "loss": loss} for at, loss in losses.items() if at <= step]
        (local / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 4}))
        value = sum(loss for at, loss in losses.items() if at <= step)
        save_file({"layer.weight": torch.full((3,), value), "norm.weight": torch.ones(2)}, local / "model.safetensors")
        checkpoints = CheckpointStore(run)
        writer = checkpoints.open_writer(step)
        writer.send(str(local))
        state = {"weights": f"w{value}", "rng": "r"}
        about = {"digest": f"digest {value}", "state": state, "chunk": step // 2, "created": "2026-11-21T10:00:00Z"}
        checkpoints.commit(step, writer, CheckpointMeta.model_validate({"chain": "c", **about, **meta}))
    return run


def answer(*words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, json.loads(done.stdout)


def test_a_run_is_found_by_name_path_and_uri(store: Storage) -> None:
    run = add(store, "mine")
    begun.note_here("mine", run.uri, ["run", "scratch.yaml"], resumes=False)

    for text in ("mine", "store/runs/mine", run.uri, "store/runs/mine/"):
        assert address.existing(text).run.uri == run.uri
        assert address.existing(f"{text.rstrip('/')}@2").step == 2
    assert address.existing("mine", "store").run.uri == run.uri
    assert address.split("az://data@account.blob/runs/x") == ("az://data@account.blob/runs/x", None)
    with pytest.raises(UserError, match="Did you mean 'mine'"):
        address.existing("mime")
    with pytest.raises(UserError, match="is not RUN or RUN@STEP"):
        address.existing("mine@latest")


def test_a_run_noted_by_an_earlier_version_is_found(store: Storage) -> None:
    run = add(store, "early")
    begun.note_here("early", run.uri, [])
    folder = Path(machine.cache_dir(), "runs")
    next(folder.glob("early@*.json")).rename(folder / "early.json")  # without the address
    assert address.resolve("early").run.uri == run.uri
    assert "early" in begun.names()


def test_a_name_is_first_that_of_the_store_here(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two stores have a run of one name: `./baton-store` wins over the newest begun, with a note."""
    here = add(Storage(str(tmp_path / DEFAULT_STORE)), "mine")
    begun.note_here("mine", here.uri, ["run", "here.yaml"], resumes=False)
    elsewhere = Run(store, "mine")
    elsewhere.create(load.load(str(RECIPES / "scratch.yaml"), [f"store={store.base_uri}"]))
    begun.note_here("mine", elsewhere.uri, ["run", "elsewhere.yaml"], resumes=False)

    assert address.existing("mine").run.uri == here.uri
    assert capsys.readouterr().err == f"note: run 'mine' of {DEFAULT_STORE}; another is at {elsewhere.uri}\n"
    assert address.existing("mine", "store").run.uri == elsewhere.uri
    (other := tmp_path / "other").mkdir()
    monkeypatch.chdir(other)
    assert address.existing("mine").run.uri == elsewhere.uri, "the newest begun"
    assert begun.names() == ["mine"]
    for run, command in ((here, "here.yaml"), (elsewhere, "elsewhere.yaml")):
        known = begun.find("mine", run.uri)
        assert known
        assert known.command == ["run", command]
    begun.note_submitted("mine", "s3://bucket/runs/mine", "http://127.0.0.1:9", None, "1")
    monkeypatch.chdir(tmp_path)
    assert isinstance(status.find("mine", None, None, None), status.Remote), "the newest begun is on Kubeflow"
    assert "run 'mine' on Kubeflow; for that of" in capsys.readouterr().err


def test_several_runs_open_as_a_comparison(store: Storage, tmp_path: Path) -> None:
    add(store, "first")
    add(store, "second", "training.learning_rate=0.5", losses={**LOSSES, 4: 1.125})

    code, found = answer("open", "store/runs/first", "store/runs/second")

    assert (code, found["runs"]) == (0, ["store/runs/first", "store/runs/second"])
    assert found["page"] == str(tmp_path / "store/pages/first-vs-second.html")
    page = read(Path(found["page"]).read_text(encoding="utf-8"))
    curves = page.curves("training loss")
    assert {name: points[-1] for name, points in curves.items()} == {"first": (4, 1.25), "second": (4, 1.125)}
    assert "training.learning_rate" in page.text
    code, found = answer("open", "first", "second", "--store", "store")
    assert code == 0
    code, found = answer("open", "store/runs/first", "store/runs/second@4")
    assert (code, "`baton diff A@STEP B@STEP` compares checkpoints." in found["error"]) == (2, True)
    code, found = answer("open", "first", "first", "--store", "store")
    assert (code, found["error"].partition(".")[0]) == (2, "a run is named twice")
    code, found = answer("open", "first", "absent", "--store", "store")
    assert (code, "absent" in found["error"]) == (2, True)


def test_a_run_keeps_the_command_and_the_commit_that_began_it(store: Storage, tmp_path: Path) -> None:
    recipe = load.load(str(RECIPES / "scratch.yaml"), [f"store={store.base_uri}"])
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
        subprocess.run(git, cwd=tmp_path, check=True, capture_output=True)
    run = Run(store, "mine")
    with begun_by(["run", "my recipe.yaml", "--run", "mine"]):
        run.create(recipe)
    first = run.need(RunInfo)
    assert first.command == "baton run 'my recipe.yaml' --run mine"
    assert re.fullmatch("[0-9a-f]{40}", first.commit)
    with begun_by(["retry", "mine"]):
        run.create(recipe)
    assert run.need(RunInfo) == first, "of the first start"
    other = Run(store, "other")
    other.create(recipe)
    assert (other.need(RunInfo).command, other.need(RunInfo).commit) == ("", "")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("store.uri=s3://AK:se/cret@bucket", "store.uri=s3://bucket"),
        ("data.source=https://ann:secret@host:8080/rows.jsonl", "data.source=https://host:8080/rows.jsonl"),
        ('data.source=["https://secret@host/rows.jsonl"]', "'data.source=[\"https://host/rows.jsonl\"]'"),
        ("https://bucket.host/recipe.yaml?X-Amz-Signature=secret&a=b", "https://bucket.host/recipe.yaml"),
        ("https://host/recipe.yaml?a=b&token=secret", "https://host/recipe.yaml"),
        ("model.base=hf://org/name@main", "model.base=hf://org/name@main"),
        ("tracking.mlflow=http://host:5000/a@b", "tracking.mlflow=http://host:5000/a@b"),
    ],
)
def test_a_runs_command_holds_no_credential(given: str, kept: str, store: Storage) -> None:
    run = Run(store, "mine")
    with begun_by(["run", given]):
        run.create(load.load(str(RECIPES / "scratch.yaml"), [f"store={store.base_uri}"]))
    assert run.need(RunInfo).command.replace("'", "") == f"baton run {kept}".replace("'", "")
    assert "secret" not in run.need(RunInfo).command


def test_a_model_is_named_by_its_run(store: Storage) -> None:
    run = add(store, "mine")
    begun.note_here("mine", run.uri, [], resumes=False)

    with pytest.raises(UserError, match=r"has exported no model\. Name a checkpoint: mine@4"):
        address.model_of("mine")
    assert address.model_of("mine@2").startswith(f"{run.uri}/checkpoints/step-00000002/")
    run.write(ExportedModel(model_uri=f"{run.uri}/export/abc"))
    assert address.model_of("mine") == address.model_of(run.uri) == f"{run.uri}/export/abc"
    assert address.model_of("org/model") == "org/model"
    assert address.model_of(f"{run.uri}/export/abc") == f"{run.uri}/export/abc"


def test_status_tells_where_a_run_is(store: Storage) -> None:
    run = add(store, "mine")
    run.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 8, "targets": [4, 8]})
    run.write(Progress(step=7, chunk=2))

    code, found = answer("status", "store/runs/mine")

    assert code == 0
    assert (found["state"], found["step"], found["num_steps"], found["saved_step"]) == ("interrupted", 7, 8, 4)
    assert found["loss"] == 1.25
    run.write(RunFailure(stage="evaluate", message="no room.", at="2026-11-21T10:00:00Z"))
    code, found = answer("status", "store/runs/mine")
    assert (code, found["state"], found["error"]) == (1, "failed", "evaluate: no room.")


def _fail(run: Run, **about: Any) -> None:
    run.write(RunFailure(stage="evaluate", message="no room.", at="2026-11-21T10:00:00Z", **about))


def _run_here(run: Run) -> None:
    begun.note_here(run.name, run.uri, [])  # this process runs it


def _end(run: Run) -> None:
    run.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 4, "targets": [2, 4]})


def _until(stage: str) -> Callable[[Run], None]:
    return lambda run: run.put("recipe.json", {**run.require("recipe.json"), "until": stage})


def _in_sweep(cause: str = "") -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.put("trial.json", {"sweep": "s", "id": "t001", "values": {}})
        stopped = [{"id": "t001", "why": "beaten", "cause": cause}] if cause else []
        rung = {"rung": 1, "chunk": 1, "kept": ["t000"], "stopped": stopped}
        run.storage.write("sweeps/s/rungs/rung-001.json", json.dumps(rung).encode())

    return act


# Name → what happened to a run that was killed at step 4 of 8, and its state everywhere.
STATES: dict[str, tuple[list[Callable[[Run], None]], lineage.State]] = {
    "killed": ([], "interrupted"),
    "killed after the last step": ([_end], "interrupted"),
    "trains": ([_run_here], "running"),
    "trains again": ([_fail, _run_here], "running"),
    "a trial that trains": ([_in_sweep(), _run_here], "running"),
    "failed": ([_fail], "failed"),
    "canceled": ([lambda run: _fail(run, is_cancelled=True)], "canceled"),
    "rejected": ([_end, lambda run: run.put("evaluation.json", {"gate": {"passed": False}})], "rejected"),
    "exported": ([_end, lambda run: run.write(ExportedModel(model_uri=f"{run.uri}/export/a"))], "succeeded"),
    "of verify, killed": ([_until("train")], "interrupted"),
    "of verify, trains": ([_until("train"), _run_here], "running"),
    "of verify, to its end": ([_until("train"), _end], "succeeded"),
    "of verify, which goes on with another": ([_until("train"), _end, _run_here], "succeeded"),
    "data of a sweep": ([_until("data")], "succeeded"),
    "a trial between rungs": ([_in_sweep()], "interrupted"),
    "a beaten trial": ([_in_sweep("beaten")], "stopped"),
    "a beaten trial of a sweep that goes on": ([_in_sweep("beaten"), _run_here], "stopped"),
    "a trial without a score": ([_in_sweep("failed")], "failed"),
    "a winner that its gate rejects": (
        [_in_sweep(), _end, lambda run: run.put("evaluation.json", {"gate": {"passed": False}})],
        "rejected",
    ),
    "a trial at its end": ([_in_sweep("beaten"), _end], "succeeded"),
}


@pytest.fixture
def in_state(store: Storage, request: pytest.FixtureRequest) -> tuple[Run, lineage.State]:
    acts, state = STATES[request.param]
    run = add(store, "mine")
    run.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 8, "targets": [4, 8]})
    for act in acts:
        act(run)
    return run, state


@pytest.mark.parametrize("in_state", STATES, indirect=True)
def test_a_state_has_one_word(in_state: tuple[Run, lineage.State]) -> None:
    run, state = in_state
    shown = CliRunner().invoke(app, ["status", run.uri]).stdout.splitlines()
    assert shown[0].startswith(f"mine: {state}")
    assert any(line.startswith("next:") for line in shown) == (state in ("interrupted", "failed", "canceled"))
    assert answer("status", run.uri)[1]["state"] == state
    (listed,) = answer("runs", "list", "--store", "store")[1]["runs"]
    assert listed["state"] == answer("runs", "show", run.uri)[1]["state"] == state
    for words in (["list"], ["graph"]):
        assert f" {state} " in CliRunner().invoke(app, ["runs", *words, "--store", "store"]).stdout
    assert CliRunner().invoke(app, ["runs", "show", run.uri]).stdout.startswith(f"mine: {state}, step 4\n")
    failure = run.read(RunFailure) if state != "running" else None
    report = collect(run, failure, as_of=now() if state == "running" else "")
    assert report.state == state
    assert f">{state}</" in render(report)


@pytest.mark.parametrize("in_state", STATES, indirect=True)
def test_a_report_opens_in_every_state(in_state: tuple[Run, lineage.State]) -> None:
    run, state = in_state
    code, found = answer("open", run.uri)
    assert (code, found["error"]) == (2, f"run 'mine' has no report; its state is {state}.")
    assert "report:" not in CliRunner().invoke(app, ["status", run.uri]).stdout
    assert answer("status", run.uri)[1]["report_uri"] is None

    run.storage.write(run.path("report.html"), b"<p>")  # as its first checkpoint does

    page = run.storage.key(run.path("report.html"))
    assert answer("open", run.uri) == (0, {"run": run.uri, "page": page})
    assert answer("status", run.uri)[1]["report_uri"] == answer("runs", "show", run.uri)[1]["report_uri"] == page
    assert f"report: {page}" in CliRunner().invoke(app, ["status", run.uri]).stdout
    assert f"report: {page}" in CliRunner().invoke(app, ["runs", "show", run.uri]).stdout
    assert api.report(run.uri).html == "<p>"


def test_a_list_of_checkpoints_tells_of_removed_ones(store: Storage) -> None:
    add(store, "whole")
    add(store, "pruned", parent={"step": 1, "digest": "d"})
    lines = {
        name: CliRunner().invoke(app, ["runs", "show", f"store/runs/{name}"]).stdout.splitlines()
        for name in ("whole", "pruned")
    }
    assert lines["pruned"][3:] == ["earlier ones: removed by retention (chunks.keep)"]
    assert lines["whole"][3:] == []


def test_a_killed_run_opens_with_a_page_of_its_end(store: Storage) -> None:
    run = add(store, "mine")
    run.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 8, "targets": [4, 8]})
    begun._write(begun.BegunRun(name="mine", run_uri=run.uri, pid=0))

    code, found = answer("open", run.uri)

    assert code == 0
    assert "Interrupted: step 4 of 8, chunk 2 of 2" in read(Path(found["page"]).read_text(encoding="utf-8")).text


@pytest.mark.parametrize(
    ("noted_at", "restarted_at", "step"),
    [(-100.0, None, 4), (100.0, None, 7), (100.0, 200.0, 4)],
    ids=["before this process", "by this process", "before its chunk was lost"],
)
def test_a_resumed_run_shows_the_step_that_it_resumes_from(
    noted_at: float, restarted_at: float | None, step: int, store: Storage
) -> None:
    run = add(store, "mine")
    run.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 8, "targets": [4, 8]})
    began = psutil.Process().create_time()
    run.write(Progress(step=7, chunk=2, at=iso(began + noted_at)))
    if restarted_at:
        run.note_restart(Restart(chunk=2, reason="killed", at=iso(began + restarted_at)))
    assert answer("status", run.uri)[1]["step"] == 7, "nothing runs: the newest step trained"

    _run_here(run)

    assert answer("status", run.uri)[1]["step"] == step
    assert answer("runs", "list", "--store", "store")[1]["runs"][0]["reached"] == step


def _retrained(run: Run) -> None:
    model = {"run": "mine", "model_uri": f"{run.uri}/export/a"}
    run.storage.write("models/made/accepted/000001.json", json.dumps(model).encode())


def _continued(run: Run) -> None:
    child = load.load(str(RECIPES / "scratch.yaml"), [f"store={run.storage.base_uri}"])
    document = child.model_dump(mode="json") | {"model": {"base": f"{run.uri}/export/a"}}
    Run(run.storage, "child").put("recipe.json", {"recipe": document, "created": "2026-11-21", "name": "child"})


NEEDED: dict[str, tuple[Callable[[Run], None], str]] = {
    "it trains": (_run_here, "run 'mine' is running. Stop it first: `baton stop mine`."),
    "a trial": (_in_sweep("beaten"), "run 'mine' is trial t001 of sweep 's', which needs it."),
    "base of another run": (_continued, "run 'child' starts from the model of run 'mine', and needs it."),
    "the model in use": (_retrained, "run 'mine' has the model in use of 'made', which retraining needs."),
}


@pytest.mark.parametrize(("act", "message"), NEEDED.values(), ids=NEEDED)
def test_a_run_that_is_needed_is_not_removed(act: Callable[[Run], None], message: str, store: Storage) -> None:
    run = add(store, "mine")
    act(run)
    before = store.find("")

    code, found = answer("runs", "remove", run.uri, "--yes")

    assert (code, found["error"]) == (2, message)
    assert store.find("") == before


def test_a_removed_run_leaves_all_others_as_they_are(store: Storage) -> None:
    run, other = add(store, "mine"), add(store, "other")
    begun._write(begun.BegunRun(name="mine", run_uri=run.uri))
    store.write("data/d/split/train.bin", b"rows")
    before = {path: found for path, found in store.find("").items() if not path.startswith("runs/mine/")}
    refused = CliRunner().invoke(app, ["runs", "remove", run.uri], input="n\n")
    assert (refused.exit_code, address.exists(run)) == (1, True)

    code, found = answer("runs", "remove", run.uri, "--yes")

    assert (code, [row["run_uri"] for row in found["removed"]]) == (0, [run.uri])
    assert store.find("") == before
    assert not Path(store.root, "runs", "mine").exists()
    assert begun.find("mine", run.uri) is None
    assert answer("runs", "remove", run.uri, "--yes")[0] == 2, "there is none"
    assert [row["name"] for row in answer("runs", "list", "--store", "store")[1]["runs"]] == [other.name]


def test_a_list_omits_no_run(store: Storage) -> None:
    add(store, "ended").write(ExportedModel(model_uri="m"))
    Run(store, "split-failed").write(RunFailure(stage="data split", message="no rows.", at="2026-11-21T09:00:00Z"))
    begins = Run(store, "interrupted")
    begins.create(load.load(str(RECIPES / "scratch.yaml"), [f"store={store.base_uri}"]))
    begins.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 240, "targets": [240]})
    begins.write(Progress(step=28, chunk=1, at=now()))
    trial = Run(store, "trial")
    trial.create(load.load(str(RECIPES / "scratch.yaml"), [f"store={store.base_uri}"]))
    trial.put("trial.json", {"sweep": "s", "id": "t001", "values": {}})
    stopped = {"rung": 1, "chunk": 1, "kept": ["t000"], "stopped": [{"id": "t001", "why": "beaten", "cause": "beaten"}]}
    store.write("sweeps/s/rungs/rung-001.json", json.dumps(stopped).encode())

    code, found = answer("runs", "list", "--store", "store")

    assert code == 0
    states = {run["name"]: (run["state"], run["step"], run["reached"]) for run in found["runs"]}
    assert states == {
        "ended": ("succeeded", 4, 4),
        "split-failed": ("failed", 0, 0),
        "interrupted": ("interrupted", 0, 28),
        "trial": ("stopped", 0, 0),
    }
    shown = CliRunner().invoke(app, ["runs", "list", "--store", "store"], env={"COLUMNS": "80"}).stdout
    assert re.search(r"interrupted +interrupted +28/240, 0 saved", shown)
    begun.note_here("interrupted", begins.uri, [])  # this process runs it
    shown = CliRunner().invoke(app, ["runs", "list", "--store", "store"], env={"COLUMNS": "80"}).stdout
    assert re.search(r"interrupted +running +28/240, 0 saved", shown)
    code, found = answer("runs", "list", "--store", "absent")
    assert (code, found["error"].partition(".")[0]) == (2, "store 'absent' does not exist")


def test_diff_of_equal_runs(store: Storage) -> None:
    add(store, "a")
    add(store, "b", "chunks.keep.last=2")

    code, found = answer("diff", "store/runs/a", "store/runs/b")

    assert (code, found["equal"], found["compared_steps"]) == (0, True, [2, 4])
    assert found["cause"] == "none: losses and states are bit-identical"


def test_diff_names_the_first_step_and_tensor(store: Storage) -> None:
    add(store, "a")
    add(store, "b", "training.learning_rate=0.5", losses={**LOSSES, 3: 1.625})

    code, found = answer("diff", "store/runs/a", "store/runs/b")

    assert code == 1
    assert found["first_value"] == {"step": 3, "name": "loss", "expected": 1.5, "found": 1.625}
    state = found["first_state"]
    assert (state["step"], state["equal_until"], state["parts"]) == (4, 2, ["weights"])
    (tensor,) = state["tensors"]
    assert (tensor["name"], tensor["count"], tensor["max_abs"]) == ("layer.weight", 3, 0.125)
    assert found["recipe"] == ["training.learning_rate: 0.01 → 0.5"]
    assert found["cause"] == "different settings: training.learning_rate: 0.01 → 0.5"
    assert answer("diff", "store/runs/a@2", "store/runs/b@2")[1]["equal"] is True
    text = CliRunner().invoke(app, ["diff", "store/runs/a", "store/runs/b"]).stdout
    assert "first value:  loss of step 3: 1.5 → 1.625" in text
    assert "model.safetensors layer.weight: 3 of 3 differ, by 0.125 at most" in text


CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "environment": ({"fingerprint": {"torch": "9.9"}}, "different environment: torch: "),
    "skipped steps": ({"skips": [3]}, "different skipped steps: [3]"),
    "user's state": ({"hooks": {"lost": {"own.py:it": "an iterator"}}}, "checkpoints do not carry: own.py:it"),
    "a boundary": ({}, "state lost or changed when the chunk after step 2 resumed"),
}


@pytest.mark.parametrize(("meta", "cause"), CAUSES.values(), ids=CAUSES)
def test_diff_names_a_likely_cause(meta: dict[str, Any], cause: str, store: Storage) -> None:
    add(store, "a")
    add(store, "b", losses={**LOSSES, 3: 1.625}, **meta)

    assert cause in answer("diff", "store/runs/a", "store/runs/b")[1]["cause"]


@pytest.mark.slow
def test_an_interrupted_run_names_the_command_that_resumes_it_and_ends_on_the_same_bits(tmp_path: Path) -> None:
    """Ctrl-C, `baton retry`, and the end; an undisturbed run has the same digest."""
    document = yaml.safe_load((RECIPES / "scratch.yaml").read_text("utf-8"))
    document |= {"name": "tiny", "store": str(tmp_path / "store"), "tracking": {"mlflow": None}}
    document["data"]["source"] = "builtin:stdlib-docs"
    document["training"] |= {"max_steps": 40, "epochs": None}
    document["chunks"] = {"count": 2, "checkpoint_every": 5}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    given = {**os.environ, "BATON_CACHE": str(tmp_path / "cache")}

    def baton(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([BATON, *words], capture_output=True, text=True, cwd=tmp_path, env=given, check=False)

    assert baton("run", "tiny.yaml", "--run", "whole").returncode == 0
    process = subprocess.Popen(
        [BATON, "run", "tiny.yaml", "--run", "cut"], cwd=tmp_path, env=given, stderr=subprocess.PIPE, text=True
    )
    cut = Run(Storage(str(tmp_path / "store")), "cut")
    deadline = time.monotonic() + 240
    while not (newest := CheckpointStore(cut).newest()) or newest.step < 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert json.loads(baton("status", "cut", "--json").stdout)["state"] == "running"
    stopped = baton("stop", "cut")
    assert stopped.returncode == 0, stopped.stderr
    assert process.wait(60) == 130
    assert process.stderr
    assert "interrupted; resume with: baton run tiny.yaml --run cut" in process.stderr.read()
    assert json.loads(baton("status", "cut", "--json").stdout)["state"] == "interrupted"
    done = baton("retry", "cut")
    assert done.returncode == 0, done.stderr
    digest = CheckpointStore(Run(cut.storage, "whole")).newest()
    assert digest
    assert f"resumed 1 time, bit-identical; final digest {digest.digest[:16]}" in done.stdout
    assert baton("diff", "cut", "whole").returncode == 0
