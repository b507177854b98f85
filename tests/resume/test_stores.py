"""A run ends on the same bits on a folder and on S3."""

from __future__ import annotations

from typing import Any

import pytest

from components.shared.checkpoints.store import CheckpointStore
from components.shared.recipe import Recipe
from components.shared.runs import Run


@pytest.mark.s3
def test_the_same_run_on_s3_ends_on_the_same_digest(
    s3_store: str, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["scratch"], store=s3_store, chunks__count=3), "on-s3")
    legs.train(run)
    assert run.uri == f"{s3_store}/runs/on-s3"
    assert legs.losses(run) == legs.losses(undisturbed["scratch"])
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state
    store = CheckpointStore(run)
    assert store.steps() == [5, 10, 15]
    assert [store.verify(store.read(step)) for step in store.steps()] == [[], [], []]
