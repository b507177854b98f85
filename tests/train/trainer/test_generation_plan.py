"""The plan counts the steps that TRL's own trainers take where the model writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import pytest

from baton.runs.plan import make_plan
from tests.support import tiny

ROUNDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "a round is a step": (10, {"batch_size": 8}, {}),
    "prompts left over": (11, {"batch_size": 8}, {}),
    "a round of two steps": (10, {"batch_size": 8}, {"steps_per_generation": 2}),
    "a round of half a step": (10, {"batch_size": 8, "micro_batch_size": 4}, {"steps_per_generation": 1}),
    "a round ends within a step": (3, {"batch_size": 8, "micro_batch_size": 4}, {"steps_per_generation": 1}),
    "each round three times": (10, {"batch_size": 8}, {"num_iterations": 3}),
    "rounds of three micro-batches, twice": (
        17,
        {"batch_size": 8, "micro_batch_size": 4},
        {"steps_per_generation": 3, "num_iterations": 2},
    ),
    "a group over several micro-batches": (10, {"batch_size": 8, "micro_batch_size": 2}, {}),
}


@pytest.mark.parametrize("method", ["grpo", "rloo"])
@pytest.mark.parametrize(("rows", "training", "generation"), ROUNDS.values(), ids=ROUNDS)
def test_steps_of_an_epoch_are_those_of_the_trainer(
    method: str, rows: int, training: Any, generation: Any, tiny_base: str, tmp_path: Path
) -> None:
    writes = {"rewards": ["length"], "num_generations": 4, "max_completion_length": 2, **generation}
    own = {"beta": 0.0} if method == "rloo" else {}
    recipe = tiny.recipe(
        tiny_base, training={"method": method, method: {**writes, **own}, "max_steps": None, **training}
    )
    prompts = datasets.Dataset.from_dict({"prompt": [f"What is {n}?" for n in range(rows)], "length": [5] * rows})
    trainer = tiny.trainer(recipe, prompts, tmp_path)
    plan = make_plan(recipe, rows)
    batches = len(trainer.get_train_dataloader())
    assert math.ceil(batches / recipe.gradient_accumulation_steps) == plan.steps_per_epoch
    seen = sum(1 for _ in trainer.get_train_dataloader())
    assert seen == batches


@pytest.mark.parametrize("prompt", ["What is 3 and 4?\n", [{"role": "user", "content": "What is 3?"}]])
def test_the_length_of_a_prompt_is_that_of_the_trainers_tokens(prompt: Any, tiny_base: str, tmp_path: Path) -> None:
    given = {"method": "grpo", "grpo": {"rewards": ["length"], "num_generations": 8}}
    recipe = tiny.recipe(tiny_base, training=given, data={"separator": ""} if isinstance(prompt, str) else {})
    rows = tiny.tokens(recipe, [{"prompt": prompt}] * 2)
    trainer = tiny.trainer(recipe, rows, tmp_path)
    tokenized = trainer._tokenize_prompts([rows[0]["prompt"]])[0]
    assert rows["length"] == [len(tokenized[0])] * 2
