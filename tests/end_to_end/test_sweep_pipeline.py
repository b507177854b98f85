"""The pipeline of a sweep that a cluster runs, and what `baton sweep` refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from baton.cli.app import app
from baton.runs.outcomes import SweepHead, TrialEntry
from baton.runs.run import Sweep, now
from baton.store.storage import Storage
from tests.support import conformance

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "pipelines" / "recipes" / "sweep.yaml"


def _baton(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The compiled file of the sweep that comes with Baton, on GPUs and with a spare chunk."""
    path = tmp_path_factory.mktemp("compiled") / "sweep.yaml"
    settings = ("resources.gpus=1", "chunks.spare=1", "sweep.parallel=3")
    changes = [word for setting in settings for word in ("--set", setting)]
    done = _baton("compile", str(RECIPE), "-o", str(path), "--pipeline", "sweep", *changes)
    assert done.exit_code == 0, done.stderr
    documents = list(yaml.safe_load_all(path.read_text()))
    assert conformance.check_documents(documents) == []
    return documents


def _loops(compiled: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the loops by their names on the page: each the task and its body."""
    pipeline = compiled[0]
    return {
        task["taskInfo"]["name"]: {"task": task, "body": pipeline["components"][task["componentRef"]["name"]]["dag"]}
        for task in pipeline["root"]["dag"]["tasks"].values()
        if "parameterIterator" in task
    }


def test_each_rung_is_a_loop_over_whoever_the_judge_before_it_lets_go_on(compiled: list[dict[str, Any]]) -> None:
    loops = _loops(compiled)
    assert list(loops) == ["data", "rung 1", "rung 2", "rung 3"]
    assert {loop["task"]["iteratorPolicy"]["parallelismLimit"] for loop in loops.values()} == {3}
    sources = []
    for loop in loops.values():
        items = loop["task"]["parameterIterator"]["items"]["inputParameter"]
        sources.append(loop["task"]["inputs"]["parameters"][items]["taskOutputParameter"]["producerTask"])
    assert sources == ["begin", "enter", "judge", "judge-2"]


def test_the_chunks_of_a_rung_follow_each_other_and_a_spare_one_closes_it(compiled: list[dict[str, Any]]) -> None:
    """Nine chunks, eta 3: the first; the second and third; the fourth to the ninth."""
    trained = {name: _chain(loop["body"]["tasks"]) for name, loop in _loops(compiled).items()}
    assert trained == {"data": [], "rung 1": [1, 1], "rung 2": [2, 3, 3], "rung 3": [4, 5, 6, 7, 8, 9, 9]}


def _chain(tasks: dict[str, Any]) -> list[int]:
    """Returns the numbers of the chunks in a loop's body, each after the one that it waits for."""
    after = {}
    for name, task in tasks.items():
        given = task["inputs"]["parameters"]
        if task["componentRef"]["name"].startswith("comp-train-chunk"):
            before = given["baton"].get("taskOutputParameter", {}).get("producerTask")
            after[before] = (name, int(given["index"]["runtimeValue"]["constant"]))
    found: list[int] = []
    before = None
    while before in after:
        before, index = after[before]
        found.append(index)
    assert len(found) == len(after)
    return found


def test_every_stage_that_runs_the_model_has_its_gpu_and_no_other(compiled: list[dict[str, Any]]) -> None:
    executors = compiled[0]["deploymentSpec"]["executors"]
    asks = {name: "accelerator" in executor["container"].get("resources", {}) for name, executor in executors.items()}
    for name, has_gpu in asks.items():
        assert has_gpu == name.startswith(("exec-train-chunk", "exec-evaluate")), name


def test_a_sweep_is_submitted_and_shown(kfp_api: Any) -> None:
    there = ("--endpoint", kfp_api.url)
    where = ("--store", "s3://bucket/baton", "--run", "rates", "--output", "json")
    done = _baton("submit", str(RECIPE), "--pipeline", "sweep", *there, *where, "--set", "sweep.parallel=3")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["run"], found["sweep_uri"]) == ("rates", "s3://bucket/baton/sweeps/rates")
    (run,) = kfp_api.runs.values()
    given = run["runtime_config"]["parameters"]
    assert (given["sweep_name"], given["store"]) == ("rates", "s3://bucket/baton")
    assert "overrides" not in given  # it would show as `[object Object]`
    spec = kfp_api.spec(run)["pipeline_spec"]
    assert spec["root"]["inputDefinitions"]["parameters"]["store"]["defaultValue"] == "s3://bucket/baton"
    limits = {task["iteratorPolicy"]["parallelismLimit"] for task in _iterated(spec)}
    assert (len(_iterated(spec)), limits) == (4, {3})
    shown = _baton("status", "rates", *there, "--output", "json")
    assert shown.exit_code == 0, shown.stderr
    names = [stage["name"] for stage in json.loads(shown.stdout)["stages"]]
    assert [name for name in names if name.startswith("judge")] == ["judge rung 1", "judge rung 2", "judge rung 3"]


def _iterated(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [task for task in spec["root"]["dag"]["tasks"].values() if "parameterIterator" in task]


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        pytest.param(("chunks.count=90", "chunks.spare=5", "sweep.halving=null"), 500, id="trials"),
        pytest.param(
            ("chunks.count=27", "sweep.method=random", "sweep.halving=null", "sweep.hyperband={}"), 500, id="brackets"
        ),
    ],
)
def test_what_a_workflow_has_no_room_for_is_not_submitted(kfp_api: Any, changes: tuple[str, ...], stages: int) -> None:
    settings = [word for change in changes for word in ("--set", change)]
    done = _baton(
        "submit", str(RECIPE), "--pipeline", "sweep", "--endpoint", kfp_api.url, "--store", "s3://b", *settings
    )
    assert done.exit_code == 2, done.output
    told = " ".join(done.stderr.split())
    count = re.search(
        r"at least (\d+) stages do not fit one workflow: their states would take [\d,]+ kB compressed", told
    )
    assert count, told
    assert int(count[1]) >= stages
    assert "or raise eta; `baton sweep run` has no limit." in told
    assert kfp_api.requests == []


def test_a_recipe_without_a_sweep_is_refused(tmp_path: Path) -> None:
    quickstart = str(RECIPE.with_name("quickstart.yaml"))
    done = _baton("sweep", "run", quickstart, "--store", str(tmp_path / "store"))
    assert done.exit_code == 2, done.stderr
    assert "recipe 'quickstart' has no sweep" in done.stderr


def test_several_machines_are_refused_on_one(tmp_path: Path) -> None:
    settings = ("--set", "resources.nodes=2", "--set", "resources.gpus=1", "--store", str(tmp_path / "store"))
    done = _baton("sweep", "run", str(RECIPE), *settings)
    assert done.exit_code == 2
    assert "resources.nodes is 2, and this is one machine" in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_validate_tells_of_the_sweep() -> None:
    done = _baton("validate", str(RECIPE))
    assert done.exit_code == 0, done.stderr
    assert "sweep: 9 trials at 3 rung(s)" in done.stdout


def test_validate_looks_at_the_trials() -> None:
    wrong = _baton("validate", str(RECIPE), "--set", "sweep.parameters={training.learning_rate: [0.1, much]}")
    assert wrong.exit_code == 2
    assert "training.learning_rate" in wrong.stderr


def test_a_wrong_path_is_told_before_anything_starts(tmp_path: Path) -> None:
    change = "sweep.parameters={training.learning_rat: [1e-4, 1e-3]}"
    done = _baton("sweep", "run", str(RECIPE), "--set", change, "--store", str(tmp_path / "store"))
    assert done.exit_code == 2
    assert "training.learning_rat: unknown key; did you mean 'learning_rate'?" in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(("status", "nothing"), "sweeps/nothing/sweep.json does not exist", id="sweep"),
        pytest.param(("stop", "there", "t009"), "has no trial 't009'", id="trial"),
        pytest.param(("fork", "there", "t000"), "a fork needs a changed value", id="fork"),
    ],
)
def test_what_is_not_there_is_named(command: tuple[str, ...], words: str, tmp_path: Path) -> None:
    trial = TrialEntry(id="t000", run="there-t000", bracket=1, values={})
    head = SweepHead(name="there", created=now(), recipe={}, metric="loss", mode="min", trials=[trial])
    Sweep(Storage(str(tmp_path / "store")), "there").write_new(head)
    done = _baton("sweep", *command, "--store", str(tmp_path / "store"))
    assert done.exit_code == 2, done.stderr
    assert words in done.stderr
