"""Every setting that the import's messages and pages of `docs/guides/migrate` name is one of the recipe's."""

import ast
import re
from pathlib import Path

import pytest

from baton.recipe.recipe import Recipe
from tools import recipe_reference as reference

ROOT = Path(__file__).resolve().parents[2]
TABLES = [path for path in sorted((ROOT / "docs/guides/migrate").glob("*.md")) if path.stem != "upgrading"]
NAMING = [*TABLES, *sorted((ROOT / "baton/importers").glob("*.[py]*"))]
SECTIONS = dict(reference.sections(Recipe.model_json_schema()))
PATHS = {f"{path}.{name}".lstrip(".") for path, section in SECTIONS.items() for name in section["properties"]}
METHODS = ("reward", "dpo", "kto", "orpo", "cpo", "grpo", "rloo")
NAMED = re.compile(
    rf"(?<![\w./])((?:{'|'.join(Recipe.model_fields)}|{'|'.join(METHODS)})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w(/])"
)
THEIRS = {
    "dpo.max_length",
    "dpo.max_prompt_length",
    "dpo.reference_free",
    "model.base_model",
    "evaluation.metrics",
    "export.to_gguf",
    "training.training_type",
}
"""Names in the left columns that begin as ours do."""


@pytest.mark.parametrize("path", NAMING, ids=lambda path: path.name)
def test_named_settings_exist(path: Path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":  # what it says, not what it does
        constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        text = "\n".join(value for value in constants if isinstance(value, str))

    named = {name for name in NAMED.findall(text) if not name.endswith(".py")}

    assert {name for name in named if name not in PATHS and f"training.{name}" not in PATHS} <= THEIRS
