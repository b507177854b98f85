"""What a message says to write instead, and where it says nothing because that is not known."""

from typing import Any

import pytest
import yaml

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.recipe.mistakes import names, yaml_text

HINTS = {
    "of another trainer": ({"adapter.lora_r": 8}, "adapter.lora_r: unknown key; did you mean 'r'?"),
    "of another section": ({"training.lora_rank": 8}, "training.lora_rank: unknown key; it is adapter.r here"),
    "at the top": ({"samples": 3}, "samples: unknown key; it is evaluation.samples here"),
    "in two sections": ({"dtype": "float32"}, "dtype: unknown key; it is model.dtype or export.dtype here"),
    "misspelt rather than elsewhere": ({"training.epoch": 1}, "training.epoch: unknown key; did you mean 'epochs'?"),
    "like nothing": ({"adapter.zzz": 1}, "adapter.zzz: unknown key; known here: type, r, alpha,"),
    "one for a list": ({"export.formats": "safetensors"}, "(got 'safetensors'); write [safetensors]"),
    "a section's name alone": ({"training": "dpo"}, "(got 'dpo'); write training: {method: dpo}"),
    "a percentage": ({"training.warmup_steps": "3%"}, "(got '3%'); write 0.03"),
    "a number with a unit": ({"training.max_steps": "40 steps"}, "(got '40 steps'); write 40"),
    "thousands": ({"training.max_steps": "4,000"}, "(got '4,000'); write 4000"),
    "a number for a text": ({"name": 2024}, "(got 2024); write it in quotes: '2024'"),
    "a name in words": ({"name": "My Model"}, "(got 'My Model'); did you mean 'my-model'?"),
    "a quantity": ({"resources.memory": "64 GiB"}, "(got '64 GiB'); did you mean '64Gi'?"),
    "a value misspelt": ({"training.lr_scheduler": "cosin"}, "(got 'cosin'); did you mean 'cosine'?"),
    "a value in capitals": ({"training.precision": "BF16"}, "(got 'BF16'); did you mean 'bf16'?"),
    "missing": ({"data": None}, "data: Input should be a valid dictionary"),
    "no source": ({"data": {}}, "data.source: missing, and it has no default; write source: rows.jsonl"),
    "a duration": (
        {"chunks.max_unsaved": "10 min"},
        "is '10 min'; expected a time such as 30s, 5m, 1h; did you mean '10m'?",
    ),
    "days": ({"chunks.checkpoint_every": "1d"}, "or continuous; did you mean '24h'?"),
    "a gate in words": (
        {"evaluation.gate": {"perplexity": "at most 98% of baseline"}},
        "production; did you mean '<= baseline * 0.98'?",
    ),
    "a gate with a sign of mathematics": (
        {"evaluation.gate": {"perplexity": "≤ 20"}},
        "is no line of a gate; expected <=, >=, < or > and a number, baseline or production; did you mean '<= 20'?",
    ),
    "a gate like none": ({"evaluation.gate": {"perplexity": "good"}}, "production, for example '<= baseline * 0.98'"),
}


@pytest.mark.parametrize(("changes", "message"), HINTS.values(), ids=HINTS)
def test_what_to_write_is_said(changes: dict[str, Any], message: str, scratch_recipe: dict[str, Any]) -> None:
    for path, value in changes.items():
        recipe_file.place(scratch_recipe, path, value)

    with pytest.raises(UserError) as caught:
        recipe_file.validate(scratch_recipe, origin="r.yaml")

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [("training.max_steps", "many"), ("training.max_steps", "4.5 steps"), ("name", "!!"), ("export.formats", 5.5)],
)
def test_nothing_is_made_up(path: str, value: Any, scratch_recipe: dict[str, Any]) -> None:
    recipe_file.place(scratch_recipe, path, value)

    with pytest.raises(UserError) as caught:
        recipe_file.validate(scratch_recipe, origin="r.yaml")

    assert "did you mean" not in str(caught.value)
    assert "; write 4" not in str(caught.value)


def test_names_that_are_given_instead_are_in_the_schema() -> None:
    schema = Recipe.model_json_schema()
    for path in {*names.ELSEWHERE.values(), *names.SHORT, *(f"{path}.{key}" for path, key in names.SHORT.items())}:
        node: dict[str, Any] = schema
        for key in path.split("."):
            assert key in node["properties"], path
            found = node["properties"][key]
            options = [found, *found.get("anyOf", [])]
            inner = (schema["$defs"][x["$ref"].rpartition("/")[2]] for x in options if "$ref" in x)
            node = next(inner, {"properties": {}})


def test_names_of_other_trainers_are_none_of_ours_where_they_stand() -> None:
    """A key that is right in its section never meets the table."""
    assert not names.ELSEWHERE.keys() & Recipe.model_fields.keys()


def test_a_merged_key_is_no_second_one() -> None:
    text = "a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  k: 3\n"
    assert yaml.load(text, yaml_text.Loader)["b"] == {"k": 3, "l": 2}
