"""A run cannot resume with another number of GPUs, or loses part of its position in the data.

Issue: https://github.com/pytorch/torchtitan/issues/811
Upstream: fixture. The position of each rank has a key of its own in torch's distributed checkpoint, as in torchtitan.
    With more ranks a key is missing, an error; with fewer one is dropped silently.
Baton: `virtual_workers` divide a step among workers, whichever processes run them. Chunks in two processes, one, and
    two again end on the bits of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from baton.recipe.recipe import Recipe


class Place:
    """Where each of so many ranks is in the data."""

    def __init__(self, ranks: int, at: int = 0) -> None:
        self.state = {f"dp_rank_{rank}": at + rank for rank in range(ranks)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.filterwarnings("ignore")
def test_upstream_knows_its_place_for_one_number_of_ranks_alone(tmp_path: Path) -> None:
    saved = str(tmp_path / "checkpoint")
    dcp.save({"dataloader": Place(2, at=40)}, checkpoint_id=saved)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: dataloader\.dp_rank_2"):
        dcp.load({"dataloader": Place(4)}, checkpoint_id=saved)
    fewer = Place(1)
    dcp.load({"dataloader": fewer}, checkpoint_id=saved)
    assert fewer.state == {"dp_rank_0": 40}, "and what the second rank had read is forgotten"


@pytest.mark.slow
def test_baton_goes_on_with_any_number(recipes: dict[str, Recipe], legs: Any) -> None:
    def recipe(processes: int, count: int) -> Recipe:
        settings = {"virtual_workers": 2, "processes": processes, "hang_after": "60s"}
        sizes = {"training__threads": 1, "training__micro_batch_size": 2, "chunks__count": count}
        changed: Recipe = legs.changed(recipes["scratch"], training__parallel=settings, **sizes)
        return changed

    whole = legs.prepare(recipe(1, 1), "one-process")
    legs.train(whole)
    run = legs.prepare(recipe(2, 3), "two-one-two")
    for index, processes in ((1, 2), (2, 1), (3, 2)):
        legs.adopt(run, recipe(processes, 3))
        code, printed = legs.leg(legs.chunk, run.uri, index)
        assert code == 0, printed
    sizes = [legs.final(run, step).meta.fingerprint.world_size for step in run.plan().targets]
    assert sizes == [2, 1, 2]
    assert legs.losses(run) == legs.losses(whole)
    assert legs.final(run).meta.state == legs.final(whole).meta.state
