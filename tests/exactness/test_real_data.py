"""Plays, GSM8K and its preferences: the loss, the margin and the reward move the right way, each in chunks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.runs.run import Run

DATA = Path(__file__).parents[1] / "assets/real"
RECIPE = Path(__file__).parents[1] / "recipes/real.yaml"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, legs: Any) -> dict[str, Run]:
    """Each phase's run, trained, evaluated and exported, from the model of the one before."""
    folder = tmp_path_factory.mktemp("real")
    sources = {
        "pretrain": DATA / "plays.txt.gz",
        "sft": DATA / "numbers.jsonl.gz",
        "dpo": DATA / "preferences.jsonl.gz",
        "grpo": _two(folder / "two.jsonl"),  # what a model that cannot reckon can still learn
    }
    recipe = load.load(str(RECIPE), [f"store={folder / 'store'}"])
    runs: dict[str, Run] = {}
    model = ""
    for phase, part in zip(recipe.phases, recipe.phase_recipes(), strict=True):
        settings = {"data__source": [str(sources[phase.name])], **({"model__base": model} if model else {})}
        runs[phase.name] = legs.prepare(legs.changed(part, **settings), f"real-{phase.name}")
        legs.train(runs[phase.name])
        for stage in (legs.evaluate, legs.export):
            code, printed = legs.leg(stage, runs[phase.name].uri)
            assert code == 0, printed
        if phase.name != "dpo":  # the reward starts from what knows numbers
            model = runs[phase.name].require("export.json")["model_uri"]
    return runs


def _two(path: Path) -> Path:
    """Writes the rows whose answer is 4 or 6."""
    with gzip.open(DATA / "numbers.jsonl.gz", "rt", encoding="utf-8") as lines:
        path.write_text("".join(line for line in lines if json.loads(line)["answer"] in ("4", "6")), encoding="utf-8")
    return path


@pytest.mark.parametrize(("phase", "fall"), [("pretrain", 1.5), ("sft", 0.5)])
def test_held_out_loss_falls(phase: str, fall: float, finished: dict[str, Run]) -> None:
    found = finished[phase].require("evaluation.json")
    assert found["after"]["loss"] < found["before"]["loss"] - fall


def test_preferred_answers_gain(finished: dict[str, Run], legs: Any) -> None:
    found = finished["dpo"].require("evaluation.json")["after"]
    assert found["reward_margin"] > 0
    margins = [entry["rewards/margins"] for entry in legs.history(finished["dpo"]) if "rewards/margins" in entry]
    assert sum(margins[-10:]) / 10 > sum(margins[:10]) / 10 + 0.05


def test_rewarded_numbers_become_more_frequent(finished: dict[str, Run], legs: Any) -> None:
    rewards = [entry["reward"] for entry in legs.history(finished["grpo"]) if "reward" in entry]
    assert len(rewards) == 60
    assert sum(rewards[-15:]) / 15 > sum(rewards[:15]) / 15 + 0.1


def test_each_phase_starts_from_the_model_before(finished: dict[str, Run]) -> None:
    for before, after in (("pretrain", "sft"), ("sft", "dpo"), ("sft", "grpo")):
        assert finished[after].recipe().model.base == finished[before].require("export.json")["model_uri"]
