"""`baton run` of a recipe with phases: one compiled pipeline, each phase from the model of the one before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import write_package
from baton.errors import UserError
from baton.recipe import load
from baton.runs.run import Run
from baton.store.storage import Storage

RECIPE = Path(__file__).parents[1] / "recipes/phases.yaml"
BATON = str(Path(sys.executable).parent / "baton")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe with its texts beside it."""
    folder = tmp_path_factory.mktemp("phases")
    lines = [
        f"the {n} quick brown foxes jump over {n * n} lazy dogs and return {n % 7} of the files" for n in range(300)
    ]
    (folder / "plays.txt").write_text("\n".join(lines), encoding="utf-8")
    document = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    document["phases"][0]["data"]["source"] = "plays.txt"
    document["store"] = str(folder / "store")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def finished(recipe: Path) -> tuple[dict[str, Any], Storage]:
    """What `baton run` printed, and the store."""
    done = subprocess.run(
        [BATON, "run", str(recipe), "--run", "two", "--output", "json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), Storage(str(recipe.parent / "store"))


@pytest.mark.slow
def test_the_last_phase_is_the_result(finished: tuple[dict[str, Any], Storage]) -> None:
    found, _ = finished
    assert (found["run"], found["state"], found["steps"]) == ("two-sft", "succeeded", 6)
    assert [checkpoint["step"] for checkpoint in found["checkpoints"]] == [3, 6]


@pytest.mark.slow
def test_a_phase_starts_from_the_model_before(finished: tuple[dict[str, Any], Storage]) -> None:
    _, storage = finished
    before, after = Run(storage, "two-pretrain"), Run(storage, "two-sft")
    assert after.recipe().model.base == before.require("export.json")["model_uri"]
    gained = before.require("evaluation.json")
    assert gained["after"]["loss"] < gained["before"]["loss"]


@pytest.mark.slow
def test_the_finder_stood_before_the_second_phase(finished: tuple[dict[str, Any], Storage]) -> None:
    _, storage = finished
    assert Run(storage, "two-pretrain").raw("lr_find.json") is None
    rate = Run(storage, "two-sft").require("lr_find.json")["learning_rate"]
    assert Run(storage, "two-sft").resolved_recipe().training.learning_rate == rate


@pytest.mark.slow
def test_the_same_run_again_trains_nothing(finished: tuple[dict[str, Any], Storage], recipe: Path) -> None:
    again = subprocess.run(
        [BATON, "run", str(recipe), "--run", "two", "--output", "json"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["checkpoints"] == finished[0]["checkpoints"]
    attempts = Run(finished[1], "two-sft").attempts(1)
    assert [attempt.outcome for attempt in attempts] == ["done", "already_done"]


def test_short_names_are_methods(recipe: Path) -> None:
    short = load.load(str(recipe), ["phases=[pretrain, sft]"])
    assert [part.training.method for part in short.phase_recipes()] == ["pretrain", "sft"]


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ("[sft, sft]", "sft, sft are not different names"),
        ("[reward, sft]", "reward trains a reward model, which nothing can start from"),
        ("[{name: a, training: {metod: sft}}]", "phase a: training.metod"),
        ("[{name: a, chunks: {count: 60}}, {name: b, chunks: {count: 60}}]", "120 chunks in all, at most 100"),
        ("[{name: UP}]", "String should match pattern"),
    ],
    ids=["twice", "reward first", "unknown key", "too many chunks", "name"],
)
def test_what_is_no_phase(phases: str, said: str, recipe: Path) -> None:
    with pytest.raises(UserError, match=said):
        load.load(str(recipe), [f"phases={phases}"])


def test_commands_for_one_training_refuse_phases(recipe: Path) -> None:
    done = subprocess.run([BATON, "prove", str(recipe)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has phases (pretrain, sft), and prove takes one training" in " ".join(done.stderr.split())


def test_the_pods_of_a_phase_are_what_its_recipe_asks_for(recipe: Path, tmp_path: Path) -> None:
    write_package(pipeline_file.for_cluster(load.load(str(recipe))), str(tmp_path / "pipeline.yaml"))
    spec, platform = yaml.safe_load_all((tmp_path / "pipeline.yaml").read_text())
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for phase, count in (("pretrain", 6), ("sft", 9)):
        tasks = spec["components"][f"comp-{phase}"]["dag"]["tasks"]
        executors = [spec["components"][task["componentRef"]["name"]]["executorLabel"] for task in tasks.values()]
        labels = [settings[executor]["podMetadata"]["labels"]["baton/recipe"] for executor in executors]
        assert labels == [f"two-{phase}"] * count
