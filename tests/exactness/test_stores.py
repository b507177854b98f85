"""A run ends on the same bits on every kind of store."""

from __future__ import annotations

from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.clouds import SCHEMES


@pytest.mark.s3
@pytest.mark.parametrize(
    "kind", ["s3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SCHEMES if kind != "s3")]
)
def test_the_same_run_elsewhere_ends_on_the_same_digest(
    kind: str, request: pytest.FixtureRequest, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    store_uri: str = request.getfixturevalue(f"{kind}_store")
    run = legs.prepare(legs.changed(recipes["scratch"], store=store_uri, chunks__count=3), "elsewhere")
    legs.train(run)
    assert run.uri == f"{store_uri}/runs/elsewhere"
    assert legs.losses(run) == legs.losses(undisturbed["scratch"])
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state
    store = CheckpointStore(run)
    assert store.steps() == [5, 10, 15]
    assert [store.verify(store.read(step)) for step in store.steps()] == [[], [], []]
