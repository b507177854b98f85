"""`import baton`: the same recipes, files, runs and messages as the command line has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import baton
from baton.cli.app import app
from baton.recipe import load

RECIPES = Path(__file__).parents[1] / "recipes"


def _command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stderr


def test_a_recipe_is_the_same_from_a_file_a_mapping_and_yaml() -> None:
    path = RECIPES / "scratch.yaml"
    text = path.read_text(encoding="utf-8")
    changes = {"training.learning_rate": 1e-3, "store.uri": "s3://bucket", "chunks.count": 3}
    loaded = baton.load(path, changes)
    assert loaded.recipe == load.load(str(path), [f"{name}={value}" for name, value in changes.items()])
    for source in (str(path), text, yaml.safe_load(text)):
        assert baton.load(source, changes).recipe == loaded.recipe
    by_names = baton.load(path, ["training.learning_rate=1e-3"], store="s3://bucket", chunks=3)
    assert by_names.recipe == loaded.recipe
    assert baton.load(loaded) is loaded
    again = baton.load(loaded, {"seed": 3})
    assert again.recipe == loaded.recipe.model_copy(update={"seed": 3})
    assert again.origin.name == loaded.origin.name == str(path)
    given = {"name": "tiny"}
    with pytest.raises(baton.UserError, match="recipe 'recipe' has 2 problem"):
        baton.load(given)
    assert given == {"name": "tiny"}


def test_a_mistake_has_the_text_that_the_command_prints(tmp_path: Path) -> None:
    path = str(RECIPES / "scratch.yaml")
    for overrides in (["training.learing_rate=1"], ["chunks.count=0"], ["nonsense"]):
        with pytest.raises(baton.UserError) as error:
            baton.run(path, overrides=overrides, store=str(tmp_path))
        code, printed = _command("run", path, "--store", str(tmp_path), "--set", overrides[0])
        assert (code, printed.strip()) == (2, f"baton: {error.value}")
    with pytest.raises(baton.UserError) as error:
        baton.checkpoints(str(tmp_path / "runs" / "nowhere"))
    code, printed = _command("runs", "show", str(tmp_path / "runs" / "nowhere"))
    assert (code, printed.strip()) == (2, f"baton: {error.value}")
    with pytest.raises(baton.UserError, match="run name 'No' is not"):
        baton.run(path, "No", store=str(tmp_path))


def test_it_compiles_to_the_bytes_of_the_command(tmp_path: Path) -> None:
    path, told = str(RECIPES / "scratch.yaml"), []
    ours, theirs, picture = (str(tmp_path / name) for name in ("ours.yaml", "theirs.yaml", "graph.mmd"))
    compiled = baton.compile(path, ours, store="s3://bucket", chunks=3, picture=picture, tell=told.append)
    assert _command("compile", path, "-o", theirs, "--store", "s3://bucket", "--chunks", "3")[0] == 0
    assert Path(ours).read_bytes() == Path(theirs).read_bytes()
    assert (compiled.path, compiled.num_chunks, compiled.bytes) == (ours, 3, Path(ours).stat().st_size)
    assert compiled.workflow.ends
    assert Path(picture).read_text(encoding="utf-8").startswith("flowchart TD\n")
    assert any("is a placeholder" in line for line in told)


def test_it_submits_what_the_command_submits(kfp_api: Any) -> None:
    submission = baton.submit(
        str(RECIPES / "scratch.yaml"), kfp_api.url, "by-python", store="s3://bucket", chunks=2, service_account="runner"
    )
    (run,) = kfp_api.runs.values()
    assert (submission.run_id, submission.run_name) == (run["run_id"], "by-python")
    assert submission.url == f"{kfp_api.url}/#/runs/details/{run['run_id']}"
    assert run["service_account"] == "runner"
    assert run["runtime_config"]["parameters"]["run_name"] == "by-python"
    assert "train-chunk-2" in str(kfp_api.spec(run))


@pytest.mark.slow
def test_a_run_is_told_as_the_command_tells_it_and_shown_in_a_notebook(tmp_path: Path) -> None:
    heard: list[Any] = []
    loaded = baton.load(
        RECIPES / "scratch.yaml", {"training.max_steps": 4, "training.epochs": None}, store=str(tmp_path), chunks=2
    )
    result = baton.run(loaded, "a", on_event=heard.append)
    assert (result["state"], result["steps"], result["run"]) == ("succeeded", 4, "a")
    assert {event.kind for event in heard} >= {"stage", "step", "checkpoint"}
    assert baton.result(result["run_uri"]) == result
    again = baton.run(loaded, "a")  # everything is done
    assert again["checkpoints"] == result["checkpoints"]
    checkpoints = baton.checkpoints(result["run_uri"])
    assert [row["step"] for row in checkpoints] == [2, 4]
    assert repr(checkpoints).endswith(": 2, 4>")
    assert [row["ok"] for row in checkpoints.verify()] == [True, True]
    assert checkpoints.open().digest == checkpoints[-1]["digest"]
    assert (Path(checkpoints.fetch("unused")) / "model.safetensors").is_file()
    assert [entry["step"] for entry in checkpoints.history() if "loss" in entry][-1] == 4
    report = baton.report(result["run_uri"])
    assert report.uri == result["report_uri"]
    assert report._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html')
    with pytest.raises(baton.UserError, match="started with another recipe"):
        baton.run(loaded, "a", overrides={"seed": 1})
