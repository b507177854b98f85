"""A run whose nodes are lost, and which resumes with fewer and then with more, ends on the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.train import chunk, supervisor
from baton.train.chunk import Ending, Outcome
from baton.train.context import TrainContext
from baton.train.trainjob import Cluster
from tests.exactness.local_nodes import LocalNodes
from tests.train.trainjob.job_api import NAMESPACE, JobApi

pytestmark = pytest.mark.slow


def test_nodes_that_are_lost_three_times_leave_no_trace(
    recipes: dict[str, Recipe], legs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)
    common = {
        "training__parallel": {"virtual_workers": 4, "hang_after": "30s"},
        "training__micro_batch_size": 1,
        "training__threads": 1,
        "chunks__checkpoint_every": 2,
        "chunks__retries": 3,
    }
    whole = legs.prepare(legs.changed(recipes["scratch"], **common), "nodes-one-process")
    legs.train(whole)
    elastic = legs.changed(recipes["scratch"], **common, resources__nodes={"min": 1, "max": 2, "patience": "1s"})
    run: Run = legs.prepare(elastic, "nodes-lost")
    api = JobApi()

    def train(run_uri: str, index: int) -> Outcome:
        return chunk.run_trainjob(TrainContext.open(run_uri, index), None, Cluster(api.client(), NAMESPACE))

    with api, LocalNodes(api, tmp_path, room=[2, 1, 2, 1], kill_at=[4, 7, 10]) as nodes:
        try:
            outcome = supervisor.run(run.uri, 1, train)
        finally:
            print(nodes.printed())
    assert outcome.ending is Ending.DONE
    assert nodes.jobs == [2, 2, 1, 2, 2, 1], "after a loss the most are asked for first"
    assert len(run.restarts()) == 3
    made = legs.final(run)
    assert made.meta.state == legs.final(whole).meta.state
    assert legs.losses(run) == legs.losses(whole)
    assert set(made.meta.restored.checked.values()) == {"match", "absent"}
