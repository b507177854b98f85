"""The recipe's reference is the one that the code gives, and complete."""

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


def test_committed_pages_are_current() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / reference.FOLDER).glob("*.md")}
    assert committed == reference.pages(), f"{reference.FOLDER} is older than baton/recipe/: run `make docs`"


def test_committed_schema_is_current() -> None:
    committed = (ROOT / "docs/recipe.schema.json").read_text(encoding="utf-8")
    assert committed == reference.json_schema(), "docs/recipe.schema.json is older than baton/recipe/: run `make docs`"


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_field_is_described(section: reference.Schema, name: str) -> None:
    assert section["properties"][name].get("description", "").strip(), (
        f"{section['title']}.{name} needs a docstring below it in baton/recipe/"
    )


def test_every_section_is_described_and_has_its_table() -> None:
    pages = reference.pages()
    schema = Recipe.model_json_schema()
    found = dict(reference.sections(schema))
    assert {section["title"] for section in found.values()} == {*schema["$defs"], "Recipe"}
    for section in found.values():
        assert section["description"].strip(), f"{section['title']} needs a docstring"
    tables = sum(text.count("\n| field | type and default | meaning |\n") for text in pages.values())
    assert tables == len({section["title"] for section in found.values()}), "one table a section"
    assert pages.keys() == {"index.md", *(f"{path}.md" for path in found if path and "." not in path)}


@pytest.mark.parametrize("path", reference.EXAMPLES.values())
def test_example_is_a_valid_recipe(path: str) -> None:
    recipe = load.load(str(ROOT / path))
    assert load.loads(load.dumps(recipe)) == recipe
