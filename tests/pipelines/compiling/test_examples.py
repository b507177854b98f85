"""Every recipe that the repository shows is one, and compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.components.shared.recipe import recipe_file
from baton.pipelines.compiling import prepare
from baton.pipelines.compiling.package import write_package

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(
    [*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("docs/examples/*.yaml"), *ROOT.glob("pipelines/recipes/*.yaml")]
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_is_a_recipe_and_compiles(path: Path, tmp_path: Path) -> None:
    recipe = recipe_file.load(str(path))
    write_package(prepare.for_cluster(recipe), str(tmp_path / "pipeline.yaml"))
    compiled = (tmp_path / "pipeline.yaml").read_text(encoding="utf-8")
    parts = recipe.phase_recipes() or [recipe]
    chunks = sum(part.slots for part in parts)
    assert compiled.count("train chunk ") + compiled.count("spare chunk ") >= chunks


def test_the_readme_lists_every_example() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.yaml"):
        assert f"({path.name})" in listed
