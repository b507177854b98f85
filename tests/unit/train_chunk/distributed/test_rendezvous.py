"""How many ranks there are."""

from __future__ import annotations

import pytest

from baton.components.shared.core.errors import BatonError, NodeError
from baton.components.shared.recipe import recipe_file
from baton.components.train_chunk.distributed import rendezvous
from baton.components.train_chunk.distributed.ranks import Ranks

RECIPE = {
    "name": "two",
    "model": {"base": "tiny"},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 4},
    "resources": {"nodes": 2, "gpus": 2},
}


def test_fewer_ranks_than_planned_are_a_broken_node_and_more_a_mistake() -> None:
    recipe = recipe_file.validate(RECIPE, origin="r.yaml")
    with pytest.raises(NodeError, match="2 processes were started, and the recipe asks for 4: on 1 of 2 machines"):
        rendezvous.join(Ranks(size=2, nodes=1, launched=True), recipe)
    with pytest.raises(BatonError, match="8 processes were started, and the recipe asks for 4") as refused:
        rendezvous.join(Ranks(size=8, nodes=4, launched=True), recipe)
    assert not isinstance(refused.value, NodeError)
