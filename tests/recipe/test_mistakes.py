"""What a message says to write instead, and where it says nothing because that is not known."""

import re
from typing import Any

import pytest
import yaml

from baton.errors import UserError
from baton.recipe import explain, load, yaml_text
from baton.recipe.recipe import Recipe

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
        "is not a gate condition; expected <=, >=, < or > and a number, baseline or production; did you mean '<= 20'?",
    ),
    "a gate like none": ({"evaluation.gate": {"perplexity": "good"}}, "production, for example '<= baseline * 0.98'"),
}


@pytest.mark.parametrize(("changes", "message"), HINTS.values(), ids=HINTS)
def test_what_to_write_is_said(changes: dict[str, Any], message: str, scratch_recipe: dict[str, Any]) -> None:
    for path, value in changes.items():
        load.set_path(scratch_recipe, path, value)

    with pytest.raises(UserError) as caught:
        load.validate(scratch_recipe, origin="r.yaml")

    assert message in str(caught.value)


WORDS = {
    "true": "true",
    "True": "True",
    "TRUE": "TRUE",
    "yes": "yes",
    "Yes": "Yes",
    "no": "no",
    "NO": "NO",
    "on": "on",
    "off": "off",
    "an octal": "0755",
    "a hexadecimal": "0x1F",
    "a binary": "0b11",
    "an exponent": "1e3",
    "another exponent": "1.50E+10",
    "a version": "1.10",
    "a sign": "+12",
    "underscores": "1_000",
    "sixties": "12:30",
    "infinite": ".inf",
    "no number": ".NaN",
    "a date": "2026-11-25",
    "a time": "2026-11-25 10:00:00",
    "another time": "2026-11-25T10:00:00Z",
}
"""Plain texts that YAML 1.1 reads as something else."""
GIVEN = {
    "block": ("resources:\n  node_selector:\n    gpu: {}\n", ()),
    "flow": ("resources: {{node_selector: {{gpu: {}}}}}\n", ()),
    "anchor": ("resources: {{node_selector: {{gpu: &x {}}}}}\n", ()),
    "override": ("", ("resources.node_selector.gpu={}",)),
    "override of another": ("resources: {{node_selector: {{gpu: 5}}}}\n", ("resources.node_selector.gpu={}",)),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_a_text_is_given_back_as_it_was_written(word: str, given: tuple[str, tuple[str, ...]]) -> None:
    text, overrides = given
    written = "name: x\nmodel: {base: a/b}\ndata: {source: x.jsonl}\n" + text.format(word)
    changes = [override.format(word) for override in overrides]

    with pytest.raises(UserError) as caught:
        load.validate(load.parse(written, changes, origin="r.yaml"), origin="r.yaml")

    assert f"(got {word}); write it in quotes: {word!r}" in str(caught.value)
    quoted = [f"resources.node_selector.gpu={word!r}"]
    mended = load.validate(load.parse(written, quoted, origin="r.yaml"), origin="r.yaml")
    assert mended.resources.node_selector == {"gpu": word}


@pytest.mark.parametrize(("value", "word"), [(True, "true"), (None, ""), (5, "5"), (1.5, "1.5")])
def test_a_value_that_nobody_wrote_is_given_as_yaml_has_it(
    value: Any, word: str, scratch_recipe: dict[str, Any]
) -> None:
    scratch_recipe["resources"] = {"node_selector": {"gpu": value}}

    with pytest.raises(UserError, match=f"; write it in quotes: '{word}'$"):
        load.validate(scratch_recipe, origin="r.yaml")


def _applied(document: dict[str, Any], message: str) -> None:
    """Does what a message says."""
    for line in message.splitlines()[1:]:
        path, _, rest = line.strip().partition(": ")
        section, _, key = path.rpartition(".")
        node = document
        for part in filter(None, section.split(".")):
            node = node[part]
        if found := re.search(r"unknown key; did you mean '(.*)'\?$", rest):
            node[found[1]] = node.pop(key)
        elif found := re.search(r"unknown key; it is (\S+) here$", rest):
            load.set_path(document, found[1], node.pop(key))
        elif found := re.search(r"(\S+) belongs to the top level of the recipe: write it there", rest):
            document[found[1]] = node.pop(key)
        elif found := re.search(r"did you mean '(.*)'\?$", rest):
            node[key] = found[1]
        elif (
            (found := re.search(r"; write it in quotes: (.*)$", rest))
            or (found := re.search(rf"; write {key}: (.*)$", rest))
            or (found := re.search(r"; write (.*)$", rest))
        ):
            node[key] = yaml.safe_load(found[1])
        else:
            raise AssertionError(f"no remedy: {line}")


REMEDIES: dict[str, dict[str, Any]] = {
    **{
        name: {path: None} for name, path in (("no name", "-name"), ("no source", "-data.source"), ("no data", "-data"))
    },
    "no model": {"-model": None},
    "no teacher": {"training.method": "distillation", "training.distillation": {}},
    "an adapter below the model": {"model.adapter": {"type": "lora"}},
    "an adapter with rank below training": {"training.adapter": {"rank": 4}},
    "a rank": {"adapter": {"rank": 8}},
    "an adapter's name": {"adapter": "lora"},
    "an adapter's rank alone": {"adapter": 16},
    **{
        f"quantization {value}": {
            "model": {"base": "a/b", "quantization": value},
            "adapter.type": "lora",
            "resources.gpus": 1,
        }
        for value in ("4bit", "4-bit", "8 bits", "int8", "int4", 4, "nf4", "fp4")
    },
    "quantization at the top": {
        "quantization": "4bit",
        "model": {"base": "a/b"},
        "adapter.type": "lora",
        "resources.gpus": 1,
    },
    "a number of chunks": {"chunks": 2},
    "a number of GPUs": {"resources": 1},
    "a method": {"training": "sft"},
    "no tracking": {"tracking": "none"},
    "off": {"tracking": "off"},
    "a source": {"data": "rows.jsonl"},
    "a model": {"model": "a/b"},
    "a rate": {"lr": 1e-4},
    "a rate below training": {"training.lr": 1e-4},
    "a percentage": {"training.warmup_steps": "3%"},
    "a unit": {"training.max_steps": "40 steps"},
    "thousands": {"training.max_steps": "4,000"},
    "a number for a name": {"name": 2024},
    "a name in words": {"name": "My Model"},
    "quantities": {"resources.memory": "64 GiB", "resources.shm": "2gb"},
    "misspelt": {"training.lr_scheduler": "cosin", "training.precision": "BF16", "training.epoch": 1},
    "one for a list": {"export.formats": "safetensors", "evaluation.metrics": "rouge"},
    "a number of other trainers": {"training.per_device_train_batch_size": 2, "num_chunks": 2},
}
"""Name → changes to a recipe, `-PATH` for what is left out."""


@pytest.mark.parametrize("changes", REMEDIES.values(), ids=REMEDIES)
def test_a_recipe_validates_once_what_is_said_is_done(changes: dict[str, Any]) -> None:
    recipe: dict[str, Any] = {"name": "x", "model": {"base": "a/b"}, "data": {"source": "rows.jsonl"}}
    for path, value in changes.items():
        if path.startswith("-"):
            section, _, key = path[1:].rpartition(".")
            del (recipe[section] if section else recipe)[key]
        else:
            load.set_path(recipe, path, value)
    messages = []
    for _ in range(4):  # a remedy may uncover the next problem, and comes to an end
        try:
            load.validate(recipe, origin="r.yaml")
            break
        except UserError as error:
            messages.append(str(error))
            _applied(recipe, messages[-1])
    assert messages
    load.validate(recipe, origin="r.yaml")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.max_steps", "many"),
        ("training.max_steps", "4.5 steps"),
        ("name", "!!"),
        ("export.formats", 5.5),
        ("chunks", "four"),
    ],
)
def test_nothing_is_made_up(path: str, value: Any, scratch_recipe: dict[str, Any]) -> None:
    load.set_path(scratch_recipe, path, value)

    with pytest.raises(UserError) as caught:
        load.validate(scratch_recipe, origin="r.yaml")

    assert "did you mean" not in str(caught.value)
    assert "; write 4" not in str(caught.value)


def test_names_that_are_given_instead_are_in_the_schema() -> None:
    schema = Recipe.model_json_schema()
    meant = {f"{path}.{key}" for path, keys in explain.SHORT.items() for key in keys}
    for path in {*explain.ELSEWHERE.values(), *explain.SHORT, *meant}:
        node: dict[str, Any] = schema
        for key in path.split("."):
            assert key in node["properties"], path
            found = node["properties"][key]
            options = [found, *found.get("anyOf", [])]
            inner = (schema["$defs"][x["$ref"].rpartition("/")[2]] for x in options if "$ref" in x)
            node = next(inner, {"properties": {}})


def test_names_of_other_trainers_are_none_of_ours_where_they_stand() -> None:
    """A key that is right in its section never meets the table."""
    assert not explain.ELSEWHERE.keys() & Recipe.model_fields.keys()


def test_a_merged_key_is_no_second_one() -> None:
    text = "a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  k: 3\n"
    assert yaml.load(text, yaml_text.Loader)["b"] == {"k": 3, "l": 2}


@pytest.mark.parametrize("changes", [{"modal": {}}, {"seed": "x"}, {"model": None}])
def test_a_recipe_of_the_store_that_is_none_has_a_remedy(
    scratch_recipe: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert load.stored(scratch_recipe, origin="store/sweeps/s").name
    with pytest.raises(UserError, match="1 problem") as told:
        load.stored({**scratch_recipe, **changes}, origin="store/sweeps/s")
    assert told.value.remedy
    assert "copy of the store" in told.value.remedy
