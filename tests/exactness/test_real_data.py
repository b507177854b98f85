"""Plays, GSM8K and its preferences: the loss, the margin and the reward move the right way, each in chunks."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.runs.run import Run

DATA = Path(__file__).parents[2] / "../shared/data"
RECIPE = Path(__file__).parents[1] / "recipes/real.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside the repository"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, legs: Any) -> dict[str, Run]:
    """Each phase's run, trained, evaluated and exported, from the model of the one before."""
    folder = tmp_path_factory.mktemp("real")
    sources = {
        "pretrain": DATA / "tinyshakespeare.txt",
        "sft": _answers(folder / "digits.jsonl", range(10)),
        "dpo": DATA / "gsm8k_preferences.jsonl",
        "grpo": _answers(folder / "two.jsonl", (4, 6)),  # what a model that cannot reckon can still learn
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


def _answers(path: Path, numbers: Collection[int]) -> Path:
    """Writes the rows of GSM8K whose answer is one of these numbers, with nothing but the number as the answer."""
    with (DATA / "gsm8k_train.jsonl").open(encoding="utf-8") as source, path.open("w", encoding="utf-8") as target:
        for line in source:
            row = json.loads(line)
            number = row["answer"].rpartition("####")[2].strip()
            if number.isdigit() and int(number) in numbers:
                target.write(json.dumps({"question": row["question"][-120:], "answer": number}) + "\n")
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
