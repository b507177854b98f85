"""Recipes and undisturbed runs that the tests here compare with."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness import matrix

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def legs() -> Any:
    """The processes of the tests here, under a module name that the forked ones find too."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    return importlib.import_module("legs")


@pytest.fixture(scope="session")
def inside(legs: Any) -> Any:
    """What is changed in the processes, beside `legs`."""
    return importlib.import_module("parallel_legs")


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory, legs: Any) -> str:
    """A tiny base model with its tokenizer."""
    folder = str(tmp_path_factory.mktemp("base") / "model")
    code, printed = legs.leg(legs.make_base, folder)
    assert code == 0, printed
    return folder


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory, base_model: str) -> dict[str, Recipe]:
    """The recipes by name, on a store that all tests of a session share."""
    store = str(tmp_path_factory.mktemp("store"))
    folder = HERE.parent / "recipes"
    return {
        "scratch": load.load(str(folder / "scratch.yaml"), [f"store={store}"]),
        "lora": load.load(str(folder / "lora.yaml"), [f"store={store}", f"model.base={base_model}"]),
    }


@pytest.fixture(scope="session")
def undisturbed(recipes: dict[str, Recipe], legs: Any) -> dict[str, Run]:
    """Each recipe run in one chunk, never stopped."""
    runs = {}
    for name, recipe in recipes.items():
        runs[name] = legs.prepare(recipe, f"{name}-whole")
        legs.train(runs[name])
    return runs


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory, base_model: str) -> Any:
    """Returns the recipe of a cell of the matrix, on a store that all cells share."""
    store, source = str(tmp_path_factory.mktemp("matrix")), matrix.write_rows(tmp_path_factory.mktemp("rows"))
    return lambda cell: matrix.recipe(cell, store, base_model, source)
