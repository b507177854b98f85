"""What tests of single settings share: bases on which each of them makes a difference, and trainings to compare.

Whether a setting changes what is learned is told from two trainings of one machine and process. Rounding explains a
difference of 1e-6 of a step or so; `DIFFERENT` is a thousand times that, so that it holds on any processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import tiny

DIFFERENT = 1e-3
"""Least difference of two trainings' weights that counts, as a share of the longer way that a weight went."""


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    Attributes:
        trainer: The trainer, after its last step.
        before: The weights that are trained, as they were.
        after: As they are.
        history: What was logged.
    """

    trainer: Any
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    history: list[dict[str, Any]]

    def moved(self) -> float:
        """Returns the longest way that a weight went."""
        return max(float((self.after[name] - value).abs().max()) for name, value in self.before.items())

    def logged(self, name: str) -> list[float]:
        """Returns a figure of all steps."""
        return [entry[name] for entry in self.history if name in entry]

    def distance(self, other: Trained) -> float:
        """Returns the largest difference of a weight, as a share of the longer way that one went."""
        assert self.after.keys() == other.after.keys()
        apart = max(float((value - other.after[name]).abs().max()) for name, value in self.after.items())
        return apart / max(self.moved(), other.moved())


@pytest.fixture(scope="session")
def varied_base(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with biases and dropout in its attention, whose completions end after any number of tokens."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, attention_bias=True, attention_dropout=0.5)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_(0.0, 0.1)
        # All hidden states have a part in common, to which the end's output weights answer: about one token in six.
        common = torch.ones(model.config.hidden_size)
        model.model.embed_tokens.weight += common
        model.lm_head.weight[tokenizer.eos_token_id] = 0.3 * common
    folder = str(tmp_path_factory.mktemp("varied"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": tiny.PAIRS,
    "orpo": tiny.PAIRS,
    "cpo": tiny.PAIRS,
    "reward": tiny.PAIRS,
    "kto": [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": number % 3 > 0}
        for number, pair in enumerate(tiny.PAIRS)
    ],
    "sft": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in tiny.PAIRS],
    "grpo": [{"prompt": pair["prompt"]} for pair in tiny.PAIRS],
    "rloo": [{"prompt": pair["prompt"]} for pair in tiny.PAIRS],
}
WRITES = {
    "rewards": ["tests.train.methods.judging:mean_token"],
    "num_generations": 4,
    "max_completion_length": 8,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"disable_dropout": True},
    "orpo": {},
    "cpo": {},
    "reward": {},
    "kto": {},
    "grpo": {**WRITES, "disable_dropout": True},
    "rloo": {**WRITES, "disable_dropout": True, "beta": 0.0},
}
"""Settings of each method that a test's own are put on top of."""

Train = Callable[..., Trained]


@pytest.fixture(scope="session")
def build(varied_base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Builds a method's trainer from the recipe, as a chunk does.

    It takes the method, its section's settings by name, and what else the recipe has as `training` and `adapter`.
    """

    def built(
        method: str = "sft",
        training: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        base: str = varied_base,
        **own: Any,
    ) -> Any:
        section = {method: {**SECTIONS[method], **own}} if method in SECTIONS else {}
        sections: dict[str, Any] = {"training": {"method": method, "max_steps": 2, **section, **(training or {})}}
        if adapter is not None:
            sections["adapter"] = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"], **adapter}
        recipe = tiny.recipe(base, **sections)
        return tiny.trainer(recipe, tiny.tokens(recipe, ROWS[method]), tmp_path_factory.mktemp("settings"))

    return built


@pytest.fixture(scope="session")
def train(build: Callable[..., Any]) -> Train:
    """Trains each setting once, for two steps unless told otherwise; takes what `build` takes."""
    known: dict[str, Trained] = {}

    def trained(method: str = "sft", **settings: Any) -> Trained:
        key = f"{method} {sorted(settings.items())}"
        if key not in known:
            trainer = build(method, **settings)
            before = _trained_weights(trainer)
            trainer.train()
            known[key] = Trained(trainer, before, _trained_weights(trainer), trainer.state.log_history)
        return known[key]

    return trained


def _trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
