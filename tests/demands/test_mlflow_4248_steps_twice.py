"""After a resume the metrics hold the steps between checkpoint and kill twice.

Issue: https://github.com/mlflow/mlflow/issues/4248
Upstream: reproduced. Transformers' `Trainer` logs into one run of MLflow 3.17, dies at step 5 and resumes at step 3.
    MLflow keeps two values each for steps 4 and 5.
Baton: asks the server for the last step of each metric before it sends. A chunk killed in the same place leaves every
    step once.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.documents import TrackingRun
from baton.tracking.client import connect
from tests.demands import upstream
from tests.tracking.test_server import server  # noqa: F401

pytestmark = pytest.mark.slow


def steps(uri: str, run_id: str, metric: str = "loss") -> list[int]:
    """The steps of a metric's values, in order."""
    return sorted(value.step for value in connect(uri).get_metric_history(run_id, metric))


def test_upstream_keeps_both_values_of_a_step(tmp_path: Path, legs: Any) -> None:
    uri, output = f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path / "output")
    run_id = connect(uri).create_run("0").info.run_id
    code, printed = legs.leg(upstream.tracked, output, uri, run_id, 5, None)
    assert code == -signal.SIGKILL, printed
    code, printed = legs.leg(upstream.tracked, output, uri, run_id, 99, f"{output}/checkpoint-3")
    assert code == 0, printed
    assert steps(uri, run_id) == [1, 2, 3, 4, 4, 5, 5, 6, 7, 8]


def test_baton_has_each_step_once(recipes: dict[str, Recipe], server: str, legs: Any) -> None:  # noqa: F811
    """On a server: beside a database of SQLite the values of a chunk wait in the run's folder until all are there."""
    uri = server
    changes = {"tracking__mlflow": uri, "chunks__checkpoint_every": 3, "chunks__wait_for_commit": True}
    run = legs.prepare(legs.changed(recipes["scratch"], **changes), "tracked")
    run_id = run.need(TrackingRun).run_id
    code, printed = legs.leg(legs.chunk, run.uri, 1, (), "step:5")
    assert code == -signal.SIGKILL, printed
    assert legs.steps(run) == [3]
    until = steps(uri, run_id)
    legs.train(run)
    assert run.plan().num_steps == 15
    assert 4 in until, "else nothing is shown"
    assert steps(uri, run_id) == list(range(1, 16))
    for metric in ("learning_rate", "grad_norm", "tokens_per_second"):
        assert steps(uri, run_id, metric) == list(range(1, 16))
    values = {value.step: value.value for value in connect(uri).get_metric_history(run_id, "loss")}
    assert values == pytest.approx(dict(legs.losses(run)), abs=0)
