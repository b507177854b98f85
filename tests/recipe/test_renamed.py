"""Settings whose names changed: both are read, and what is hashed, stored and compared keeps the first."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import explain, load, parameters
from baton.recipe.recipe import Recipe
from baton.runs.run import identity
from baton.source import prepare
from baton.source.origin import RecipeSource

BASE: dict[str, Any] = {
    "name": "renamed",
    "model": {"base": "org/model"},
    "data": {"source": "builtin:stdlib-docs"},
    "training": {"parallel": "ddp"},
    "evaluation": {"every": 2},
    "chunks": {"count": 2},
    "sweep": {"parameters": {"seed": [1, 2]}},
}
VALUES = {
    "training.parallel.hang_timeout": "3m",
    "evaluation.sample_every": 4,
    "chunks.extra": 2,
    "data.template_date": "2026-01-02",
    "tracking.mlflow_ui_url": "https://mlflow",
    "sweep.max_parallel_trials": 3,
}
FORMER = {
    "training.parallel.hang_timeout": "training.parallel.hang_after",
    "evaluation.sample_every": "evaluation.write_every",
    "chunks.extra": "chunks.spare",
    "data.template_date": "data.today",
    "tracking.mlflow_ui_url": "tracking.mlflow_page",
    "sweep.max_parallel_trials": "sweep.parallel",
}


def made(path: str, value: object) -> Recipe:
    """Return the recipe with a value at a path."""
    return load.validate(document(path, value), origin="r")


def document(path: str, value: object) -> dict[str, Any]:
    """Return plain values with one at a path."""
    found: dict[str, Any] = json.loads(json.dumps(BASE))
    if path.startswith("training.parallel"):
        found["training"]["parallel"] = {}
    load.set_path(found, path, value)
    return found


def test_the_table_is_whole() -> None:
    assert explain.renamed() == FORMER == dict.fromkeys(VALUES) | FORMER


@pytest.mark.parametrize("path", VALUES)
def test_both_names_make_one_recipe(path: str) -> None:
    former, value = FORMER[path], VALUES[path]
    new, old = made(path, value), made(former, value)

    assert new == old
    assert load.dumps(new) == load.dumps(old)
    assert f'"{former.rpartition(".")[2]}":' in load.dumps(new)
    assert f'"{path.rpartition(".")[2]}":' not in load.dumps(new)
    assert load.loads(load.dumps(new)) == new
    if new.sweep is None:
        assert identity(new) == identity(old)
    for name in (path, former):
        override = f"{name}={json.dumps(value)}"
        assert load.with_overrides(load.validate(BASE, origin="r"), [override]) == new
        for before in (document(path, None), document(former, None)):
            assert load.validate(load.parse(before, [override], origin="r"), origin="r") == new


@pytest.mark.parametrize("path", VALUES)
def test_both_at_once_are_refused(path: str) -> None:
    both = document(path, VALUES[path])
    load.set_path(both, FORMER[path], VALUES[path])
    with pytest.raises(UserError, match=f"{path} and {FORMER[path]} are the same setting"):
        load.validate(both, origin="r")


@pytest.mark.parametrize("path", VALUES)
def test_a_note_names_what_replaced_it(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="baton"):
        prepare.load(RecipeSource("r", "", ".", document(path, VALUES[path])))
        assert not caplog.records
        loaded = prepare.load(RecipeSource("r", "", ".", document(FORMER[path], VALUES[path])))

    assert [record.getMessage() for record in caplog.records] == [f"note: {FORMER[path]} is called {path} now"]
    written = load.to_yaml(loaded.recipe, as_written=True)
    assert load.former_names(load.parse(written, origin="r")) == []
    assert load.validate(load.parse(written, origin="r"), origin="r") == loaded.recipe


def test_phases_and_parameters_take_both() -> None:
    phases = load.validate(
        {
            **BASE,
            "sweep": None,
            "chunks": {"extra": 1},
            "phases": ["pretrain", {"name": "two", "chunks": {"extra": 2}}],
        },
        origin="r",
    )
    assert [part.chunks.spare for part in phases.phase_recipes()] == [1, 2]
    for name in ("sample_every", "write_every"):
        changed = parameters.apply_parameters(phases, {}, {f"two.evaluation.{name}": 4.0})
        assert [part.evaluation.write_every for part in changed.phase_recipes()] == [None, 4]
    with pytest.raises(UserError, match=r"chunks\.spare cannot be changed in a compiled pipeline"):
        parameters.apply_parameters(phases, {}, {"chunks.extra": 4})


@pytest.mark.parametrize("path", VALUES)
def test_messages_and_schema_have_the_names_of_today(path: str) -> None:
    with pytest.raises(UserError, match=f"{path}: ") as error:
        made(path, {"wrong": []})
    assert FORMER[path] not in str(error.value)
    name, former = path.rpartition(".")[2], FORMER[path].rpartition(".")[2]
    schema = Recipe.model_json_schema()
    having = [section for section in schema["$defs"].values() if name in section.get("properties", {})]
    assert len(having) == 1
    assert former not in having[0]["properties"]
    assert former not in (schema["properties"][path.partition(".")[0]].get("default") or {})
