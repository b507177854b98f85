"""Every recipe that the repository shows is one, and compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import write_package
from baton.recipe import load

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    [*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("docs/examples/*.yaml"), *ROOT.glob("pipelines/recipes/**/*.yaml")]
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_is_a_recipe_and_compiles(path: Path, tmp_path: Path) -> None:
    recipe = load.load(str(path))
    write_package(pipeline_file.for_cluster(recipe), str(tmp_path / "pipeline.yaml"))
    compiled = (tmp_path / "pipeline.yaml").read_text(encoding="utf-8")
    parts = recipe.phase_recipes() or [recipe]
    chunks = sum(part.slots for part in parts)
    assert compiled.count("train chunk ") + compiled.count("spare chunk ") >= chunks


@pytest.mark.parametrize(("epochs", "chunks"), [("null", 1), ("0.5", 1), ("3", 3), ("3.2", 4)])
def test_a_chunk_for_each_epoch_begun(epochs: str, chunks: int, tmp_path: Path) -> None:
    given = ["chunks.count=per-epoch", f"training.epochs={epochs}", "training.max_steps=null"]
    recipe = load.load(str(ROOT / "pipelines/recipes/quickstart.yaml"), given)
    path = tmp_path / "pipeline.yaml"
    write_package(pipeline_file.for_cluster(recipe), str(path))
    tasks = next(yaml.safe_load_all(path.read_text(encoding="utf-8")))["root"]["dag"]["tasks"]
    names = [task["taskInfo"]["name"] for task in tasks.values()]
    assert sorted(name for name in names if name.startswith("train chunk")) == [
        f"train chunk {number}" for number in range(1, chunks + 1)
    ]


def test_the_readme_lists_every_example() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.yaml"):
        assert f"({path.name})" in listed
