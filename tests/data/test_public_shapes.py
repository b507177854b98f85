"""Public data sets as they come: made-up rows of the same columns, each with the method that they are for.

`public_shapes.jsonl` has a row of each, and what `data.format: auto` makes of it without a word from the user; or,
where it cannot know, the nearest shape that it names.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.data import schema
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.data import DataSource
from tests.data.splitting import normalized, sides, split, write

SHAPES = [json.loads(line) for line in (Path(__file__).parent / "public_shapes.jsonl").read_text("utf-8").splitlines()]
FOUND = [shape for shape in SHAPES if "expected" in shape]
UNKNOWN = [shape for shape in SHAPES if "nearest" in shape]


def normalised(shape: dict[str, Any], **data: Any) -> Any:
    """What becomes of a data set's row."""
    method = shape["method"]
    own = {method: {"rewards": ["exact"]}} if method == "grpo" else {}
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl", **data},
        "training": {"method": method, **own},
    }
    recipe = load.validate(document, origin="r.yaml")
    layout = schema.infer_mapping(DataSource(uri="rows.jsonl"), recipe, sorted(set(schema.column_paths(shape["row"]))))
    return normalized(shape["row"], layout)


@pytest.mark.parametrize("shape", FOUND, ids=[shape["name"] for shape in FOUND])
def test_what_becomes_of_a_row(shape: dict[str, Any]):
    assert normalised(shape) == shape["expected"]


@pytest.mark.parametrize("shape", UNKNOWN, ids=[shape["name"] for shape in UNKNOWN])
def test_the_nearest_shape_is_named(shape: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        normalised(shape)

    assert caught.value.remedy == shape["nearest"]


@pytest.mark.parametrize("name", ["Anthropic/hh-rlhf", "lmsys/chatbot_arena_conversations", "trl-lib/kto-mix-14k"])
def test_a_data_set_is_split_without_a_word(name: str, tmp_path: Path):
    shape = next(shape for shape in FOUND if shape["name"] == name)

    def numbered(value: Any, number: int) -> Any:
        return json.loads(json.dumps(value).replace("1+1", f"1+{number}"))

    source = write(tmp_path / "rows.jsonl", [numbered(shape["row"], number) for number in range(30)])
    found = split(str(tmp_path / "store"), source, method=shape["method"], split={"eval": 0.3})

    rows = [row for side in sides(str(tmp_path / "store"), found).values() for row in side]
    expected = [numbered(shape["expected"], number) for number in range(30)]
    assert sorted(map(json.dumps, rows)) == sorted(json.dumps(row, sort_keys=True) for row in expected)
    assert found["rejected"] == 0


def test_columns_by_path():
    opus = next(shape for shape in UNKNOWN if shape["name"] == "Helsinki-NLP/opus_books")

    found = normalised(opus, columns={"prompt": "translation.fr", "completion": "translation.en"})

    assert found == {"prompt": "Combien font 1+1 ?", "completion": "What is 1+1?"}


def test_how_many_are_found_without_a_word():
    assert len({shape["name"] for shape in SHAPES}) == len(SHAPES) >= 100
    assert len(FOUND) >= 0.95 * len(SHAPES)
