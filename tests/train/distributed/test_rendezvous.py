"""How many ranks there are."""

from __future__ import annotations

import pytest

from baton.errors import BatonError, NodeError
from baton.recipe import load
from baton.train import distributed
from baton.train.distributed import Ranks

RECIPE = {
    "name": "two",
    "model": {"base": "tiny"},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 4},
    "resources": {"nodes": 2, "gpus": 2},
}


def test_fewer_ranks_than_planned_are_a_broken_node_and_more_a_mistake() -> None:
    recipe = load.validate(RECIPE, origin="r.yaml")
    with pytest.raises(NodeError, match="2 processes were started, and the recipe asks for 4: on 1 of 2 machines"):
        distributed.join_ranks(Ranks(size=2, nodes=1, launched=True), recipe)
    with pytest.raises(BatonError, match="8 processes were started, and the recipe asks for 4") as refused:
        distributed.join_ranks(Ranks(size=8, nodes=4, launched=True), recipe)
    assert not isinstance(refused.value, NodeError)
