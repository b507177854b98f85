"""What a LoRA adapter is told: which layers have one, its scale, which biases are trained, and that they are."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.train.methods.conftest import DIFFERENT, Train, Trained

FAST: dict[str, Any] = {"max_steps": 2, "learning_rate": 1.0}


def layers(trained: Trained) -> dict[str, float]:
    """Returns the scale of each layer that has an adapter, by its name."""
    modules = trained.trainer.model.named_modules()
    return {
        name.removeprefix("base_model.model.model."): module.scaling["default"]
        for name, module in modules
        if hasattr(module, "lora_A")
    }


def tuned(train: Train, **adapter: Any) -> Trained:
    return train("sft", training=FAST, adapter=adapter)


BIASES = {
    "none": "",
    "lora_only": r"(q|v)_proj",
    "all": r"(q|k|v|o)_proj",
}


@pytest.mark.parametrize(("bias", "expected"), BIASES.items(), ids=BIASES)
def test_the_biases_that_are_asked_for_are_trained(bias: str, expected: str, train: Train) -> None:
    found = tuned(train, bias=bias)
    everywhere = {f"layers.{number}.self_attn.{name}_proj" for number in (0, 1) for name in "qkvo"}
    wanted = {name for name in everywhere if expected and re.search(expected, name)}
    trained = {name for name in found.after if name.endswith("bias")}
    assert {re.sub(r"^base_model\.model\.model\.|(\.base_layer)?\.bias$", "", name) for name in trained} == wanted
    still = {name for name in trained if (found.after[name] == found.before[name]).all()}
    assert not {name for name in still if "k_proj" not in name}, "a key's bias shifts all scores alike: no slope"


def test_rslora_scales_by_the_root_of_the_rank(train: Train) -> None:
    plain, scaled = tuned(train), tuned(train, rslora=True)
    assert set(layers(plain).values()) == {8 / 4}
    assert set(layers(scaled).values()) == {8 / 4**0.5}
    assert scaled.distance(plain) > DIFFERENT


def test_a_pattern_sets_the_scale_of_its_layers_alone(train: Train) -> None:
    plain, patterned = tuned(train), tuned(train, alpha_pattern={"layers.1.self_attn.v_proj": 32})
    expected = {**layers(plain), "layers.1.self_attn.v_proj": 32 / 4}
    assert layers(patterned) == expected != layers(plain)
    assert patterned.distance(plain) > DIFFERENT


@pytest.mark.parametrize("exclude", [["layers.0.self_attn.q_proj"], r".*layers\.0\..*q_proj"], ids=["name", "pattern"])
def test_excluded_layers_have_no_adapter(exclude: Any, train: Train) -> None:
    plain, fewer = tuned(train), tuned(train, exclude_modules=exclude)
    assert layers(plain).keys() - layers(fewer).keys() == {"layers.0.self_attn.q_proj"}
    assert {name for name in plain.after if "layers.0.self_attn.q_proj" not in name} == fewer.after.keys()
