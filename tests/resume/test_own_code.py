"""The example with code of one's own: it travels with the run, in any number of chunks, and cannot change under it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.components.shared.recipe import Recipe, recipe_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "hooks"


@pytest.fixture
def own(tmp_path: Path) -> Recipe:
    """The example's recipe, its code in a folder that the test may change."""
    shutil.copytree(EXAMPLE, tmp_path / "code")
    settings = [f"store={tmp_path / 'store'}", f"hooks.source={tmp_path / 'code'}", "training.threads=1"]
    return recipe_file.load(str(EXAMPLE / "recipe.yaml"), settings)


def test_chunks_of_the_example_end_on_the_bits_of_one_run(own: Recipe, legs: Any) -> None:
    whole, parts = legs.prepare(legs.changed(own, chunks__count=1), "whole"), legs.prepare(own, "parts")
    legs.train(whole)
    assert own.hooks.source
    shutil.rmtree(own.hooks.source)  # chunks have it from the store
    legs.train(parts)
    assert legs.losses(parts) == legs.losses(whole)
    assert legs.final(parts).meta.state == legs.final(whole).meta.state
    assert legs.final(parts).meta.restored.checked["callbacks"] == "match"


def test_changed_code_is_another_run(own: Recipe, legs: Any) -> None:
    legs.prepare(own, "mine")
    with (Path(str(own.hooks.source)) / "own.py").open("a", encoding="utf-8") as file:
        file.write("\n# changed\n")
    code, printed = legs.leg(legs.split_and_tokenize, recipe_file.dumps(own), "mine")
    assert code == 2
    assert "run 'mine' has another code.json" in printed


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere:thing", "cannot be imported: No module named 'nowhere'"),
        ("own:Missing", "does not exist"),
    ],
    ids=["module", "object"],
)
def test_a_hook_that_is_not_there_is_one_message(path: str, said: str, own: Recipe, legs: Any) -> None:
    run = legs.prepare(legs.changed(own, hooks__callbacks=[{"use": path}]), "wrong")
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 2
    assert said in printed
    assert "Traceback" not in printed
