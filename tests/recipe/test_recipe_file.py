"""Recipe files: YAML in, overrides by dotted path, and the JSON that pods are given."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.source import prepare

EXAMPLE = """
name: gsm8k-lora
seed: 7
store: s3://baton
model: {base: Qwen/Qwen3-0.6B}
data:
  source: gsm8k_train.jsonl
  columns: {prompt: question, completion: answer}
  split: {eval: 0.1}
  max_length: 512
adapter: {type: lora, r: 16, alpha: 32, dropout: 0.05}
training:
  method: sft
  batch_size: 16
  micro_batch_size: 4
  epochs: 2
  learning_rate: 2.0e-4
  lr_scheduler: cosine
chunks: {count: 8, checkpoint_every: 5m}
evaluation: {samples: 8}
export: {formats: [safetensors]}
resources: {accelerator: nvidia.com/gpu, gpus: 1, memory: 64Gi}
tracking: {mlflow: "sqlite:///mlflow.db"}
"""


@pytest.fixture
def example(tmp_path: Path) -> str:
    """Path of the example recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text(EXAMPLE, encoding="utf-8")
    return str(path)


def test_the_example_loads(example: str):
    recipe = load.load(example)

    assert (recipe.name, recipe.seed, recipe.store.uri) == ("gsm8k-lora", 7, "s3://baton")
    assert (recipe.model.base, recipe.model.from_scratch) == ("Qwen/Qwen3-0.6B", None)
    assert recipe.data.source == ["gsm8k_train.jsonl"]
    assert recipe.data.columns == {"prompt": "question", "completion": "answer"}
    assert recipe.adapter is not None
    assert (recipe.adapter.r, recipe.adapter.alpha, recipe.adapter.dropout) == (16, 32, 0.05)
    assert (recipe.gradient_accumulation_steps, recipe.training.epochs) == (4, 2)
    assert (recipe.training.learning_rate, recipe.training.lr_scheduler) == (0.0002, "cosine")
    assert (recipe.chunks.count, recipe.chunks.every_seconds) == (8, 300)
    assert (recipe.resources.gpus, recipe.resources.memory) == (1, "64Gi")


SET = {
    "float": ("training.learning_rate=1e-4", "training.learning_rate", 0.0001),
    "integer": ("chunks.count=4", "chunks.count", 4),
    "boolean": ("data.shuffle=false", "data.shuffle", False),
    "null": ("tracking.mlflow=null", "tracking.mlflow", None),
    "nothing": ("adapter=", "adapter", None),
    "list": ("data.source=[a.csv, b.csv]", "data.source", ["a.csv", "b.csv"]),
    "mapping": ("data.columns={prompt: q}", "data.columns", {"prompt": "q"}),
    "quoted": ("name='1'", "name", "1"),
    "equals sign": ("tracking.mlflow=http://h/?a=b", "tracking.mlflow", "http://h/?a=b"),
    "new section": ("evaluation.every=10", "evaluation.every", 10),
    "new mapping": ("resources.node_selector.zone=a", "resources.node_selector", {"zone": "a"}),
}


@pytest.mark.parametrize(("override", "path", "expected"), SET.values(), ids=SET)
def test_set(override: str, path: str, expected: Any, example: str):
    value: Any = load.load(example, [override]).model_dump()
    for key in path.split("."):
        value = value[key]

    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1e-4", "1.e-4", "1.0e-4", "0.0001"])
def test_a_number_is_one_where_any_type_goes(text: str, scratch_recipe: dict[str, Any], tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(scratch_recipe), encoding="utf-8")

    recipe = load.load(str(path), [f"model.from_scratch.config.rms_norm_eps={text}"])

    assert recipe.model.from_scratch is not None
    assert recipe.model.from_scratch.config == {"rms_norm_eps": 0.0001}


def test_overrides_apply_in_order(example: str):
    assert load.load(example, ["chunks.count=2", "chunks={count: 3}", "seed=1", "seed=2"]).chunks.count == 3


MALFORMED = {
    "no value": ("training.epochs", "is not dotted.path=value"),
    "no path": ("=3", "is not dotted.path=value"),
    "hole in the path": ("training..epochs=3", "is not dotted.path=value"),
    "not YAML": ("data.source=[a", "the value is not YAML; quote it."),
    "below a value": ("name.first=x", "'name' is a value, it has no keys below it."),
    "unknown key": ("training.epoch=1", "training.epoch: unknown key; did you mean 'epochs'?"),
}


@pytest.mark.parametrize(("override", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_override(override: str, message: str, example: str):
    with pytest.raises(UserError) as caught:
        load.load(example, [override])

    assert message in str(caught.value)


@pytest.mark.parametrize("store", ["with: colon", "2024", "a #b", "[x]", "null", "ü"], ids=repr)
def test_a_store_from_the_command_line_is_taken_as_it_is(store: str, example: str):
    assert prepare.load(example, store=store).recipe.store.uri == store


BROKEN = {
    "empty": (b"", "is empty, expected keys and values"),
    "key twice": (b"a: 1\nb:\n  c: 1\n  c: 2\n", "the key 'c' occurs twice, in line 3 and in line 4. Remove one"),
    "list": (b"- a\n", "holds a list, expected keys and values"),
    "not YAML": (b"a: [", "is not YAML: while parsing"),
    "tabs": (b"a:\n\tb: 1", "and line 2 begins with a tab: write two spaces for each"),
    "sign of YAML's": (
        b"a:\n  b: >= 1\n",
        "expected chomping or indentation indicators, but found '=' (line 2, column",
    ),
    "colon in a value": (b"a: b: c\n", 'Write line 1 so: a: "b: c"'),
    "no space": (b"a: 1\nb:2\nc: 3\n", "Write line 2 so: b: 2"),
    "not UTF-8": (
        b"name: x\n# \xff",
        "is not YAML: line 2 has the byte 0xff, which is not UTF-8. In Windows' encoding",
    ),
    "half a UTF-16": (b"\xff\xfen\0a", "is not YAML: it begins as utf-16, and the others are not."),
    "no-break space": (
        b"name: x\nseed:\xc2\xa011\ndata: {source: \xe2\x80\x93.jsonl}\nstore: x",
        "Line 2 has NO-BREAK SPACE (U+00A0); write it so: seed: 11",
    ),
    "no-break space in a key": (
        b"name: x\ndata: {source: x}\nmodel: {base: a/b}\nse\xc2\xa0ed: 11",
        "se\xa0ed: unknown key; it has NO-BREAK SPACE (U+00A0); did you mean 'se ed'?",
    ),
    "quotes of a word processor": (
        'name: "x”'.encode(),
        'Line 1 has RIGHT DOUBLE QUOTATION MARK (U+201D); write it so: name: "x"',
    ),
    "object": (b"!!python/object/apply:os.getcwd []", "is not YAML: could not determine a constructor"),
    "number as key": (b"1: 2", "1:"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)

    with pytest.raises(UserError) as caught:
        load.load(str(path))

    assert f"recipe {str(path)!r}" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["absent.yaml", "."], ids=["absent", "folder"])
def test_no_file(name: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"is not a file\. Give the path of a YAML recipe"):
        load.load(str(tmp_path / name))


@pytest.mark.parametrize(
    "source", ["/usr/lib/python3.11/x.jsonl", "python3python3", "ü \\u0033 \"'\n", "a.csv"], ids=repr
)
def test_dumps_and_loads(source: str, example: str):
    recipe = load.load(example)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": [source]})})

    text = load.dumps(recipe)

    assert "python3" not in text
    assert load.loads(text) == recipe


def test_to_yaml_loads_again(example: str, tmp_path: Path):
    recipe = load.load(example)
    path = tmp_path / "resolved.yaml"
    path.write_text(load.to_yaml(recipe), encoding="utf-8")

    assert load.load(str(path)) == recipe


def test_changed_paths():
    a = {"seed": 1, "training": {"epochs": 1, "method": "sft"}}
    b = {"seed": 2, "training": {"epochs": 1, "method": "sft", "threads": 2}}

    assert load.changed_paths(a, b) == ["seed: 1 → 2", "training.threads: None → 2"]


def test_the_schema_describes_every_property():
    schema = Recipe.model_json_schema()
    sections = {"Recipe": schema, **schema["$defs"]}
    described = {
        f"{section}.{name}": entry.get("description") or sections[entry["$ref"].rpartition("/")[2]]["description"]
        for section, definition in sections.items()
        for name, entry in definition["properties"].items()
    }

    assert len(described) > 80
    assert [path for path, description in described.items() if len(description) < 10] == []
