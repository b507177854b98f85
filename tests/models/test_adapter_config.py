"""Adapter configurations of equal runs are equal files, whatever the order of PEFT's sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from baton.models.trainable import sort_adapter_configs

# Values in an adapter's configuration → the same in order. Only sets have none of their own.
NAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "targets": ({"target_modules": ["v", "k", "q"]}, {"target_modules": ["k", "q", "v"]}),
    "excluded": ({"exclude_modules": ["b", "a"]}, {"exclude_modules": ["a", "b"]}),
    "expression": ({"target_modules": ".*_proj"}, {"target_modules": ".*_proj"}),
    "none": ({"target_modules": None}, {"target_modules": None}),
    "a list with an order": ({"modules_to_save": ["lm_head", "embed"]}, {"modules_to_save": ["lm_head", "embed"]}),
}


@pytest.mark.parametrize(("values", "ordered"), NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("place", [".", "ref"])
def test_names_of_modules_are_sorted(place: str, values: Any, ordered: Any, tmp_path: Path) -> None:
    file = tmp_path / place / "adapter_config.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"r": 8, **values}))
    sort_adapter_configs(str(tmp_path))
    assert json.loads(file.read_text()) == {"r": 8, **ordered}


def test_a_sorted_configuration_is_still_pefts(tmp_path: Path) -> None:
    config = LoraConfig(
        r=4, target_modules=["v_proj", "q_proj", "k_proj", "o_proj"], exclude_modules=["lm_head", "embed"]
    )
    config.save_pretrained(str(tmp_path))
    before = json.loads((tmp_path / "adapter_config.json").read_text())
    sort_adapter_configs(str(tmp_path))
    text = (tmp_path / "adapter_config.json").read_text()
    assert json.loads(text)["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True), "as PEFT writes it"
    assert before.keys() == json.loads(text).keys()
    assert LoraConfig.from_pretrained(str(tmp_path)).target_modules == config.target_modules
