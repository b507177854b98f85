"""The recipe's reference is the one that the code gives, and complete."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from tools import recipe_reference as reference

ROOT = Path(__file__).resolve().parents[2]
FIELDS = [
    pytest.param(section, name, id=f"{path}.{name}".lstrip("."))
    for path, section in reference.sections(Recipe.model_json_schema())
    for name in section["properties"]
]


@pytest.mark.parametrize(
    ("path", "fresh"),
    [
        pytest.param("docs/reference/recipe/index.md", reference.markdown, id="reference"),
        pytest.param("docs/recipe.schema.json", reference.json_schema, id="schema"),
    ],
)
def test_committed_file_is_what_the_code_gives(path: str, fresh: Callable[[], str]) -> None:
    committed = (ROOT / path).read_text(encoding="utf-8")
    assert committed == fresh(), f"{path} is older than baton/recipe/: run `make docs` and commit it"


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_field_is_described(section: reference.Schema, name: str) -> None:
    assert section["properties"][name].get("description", "").strip(), (
        f"{section['title']}.{name} needs a docstring below it in baton/recipe/"
    )


def test_every_section_is_described_and_has_its_table() -> None:
    text = reference.markdown()
    schema = Recipe.model_json_schema()
    found = dict(reference.sections(schema))
    assert {section["title"] for section in found.values()} == {*schema["$defs"], "Recipe"}
    for path, section in found.items():
        assert section["description"].strip(), f"{section['title']} needs a docstring"
        assert f"\n## {path or 'Top level'}\n" in text


@pytest.mark.parametrize("path", reference.EXAMPLES.values())
def test_example_is_a_valid_recipe(path: str) -> None:
    recipe = load.load(str(ROOT / path))
    assert load.loads(load.dumps(recipe)) == recipe
