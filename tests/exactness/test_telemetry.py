"""A chunk that is asked for its figures tells them, and trains to the same bits."""

from __future__ import annotations

import importlib
import re
import socket
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton import events
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.train import live

ON_A_GPU = {"baton_model_flops_utilization_ratio", "baton_gpu_memory_bytes"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {x.name: [(sample.labels, sample.value) for sample in x.samples] for x in families}


def test_a_chunk_tells_how_it_is_doing(
    recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, port: int
) -> None:
    aside = importlib.import_module("background")
    recipe = legs.changed(
        recipes["scratch"], chunks__count=2, chunks__checkpoint_every=3, tracking__prometheus_port=port
    )
    run = legs.prepare(recipe, "asked")
    first = aside.Background(aside.slow_chunk, run.uri, 1, 0.2)
    first.wait_for(events.CheckpointCommitted, step=6)
    found = _scrape(port)
    assert first.wait() == 0, first.printed
    names = {name for name, _ in (*live.LOGGED_GAUGES.values(), *live.LIVE_GAUGES.values(), live.PHASE_GAUGE)}
    assert set(found) == names - ON_A_GPU - {live.LIVE_GAUGES[name][0] for name in live.BUDGET}
    mine = {"run": "asked", "recipe": "scratch", "chunk": "1"}
    assert found["baton_target_step"] == [(mine, 8.0)]
    assert found["baton_checkpoint_step"] == [(mine, 6.0)]
    (_, step), (_, goodput), (_, loss) = (found[f"baton_{name}"][0] for name in ("step", "goodput_ratio", "loss"))
    assert step in (6.0, 7.0, 8.0)
    assert 0 < goodput < 1
    assert loss in dict(legs.losses(undisturbed["scratch"])).values()
    assert {labels["phase"] for labels, _ in found["baton_chunk_phase_seconds"]} >= {"start", "import", "train", "save"}
    assert legs.leg(legs.chunk, run.uri, 2)[0] == 0
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state


def test_a_port_that_is_taken_is_a_warning(recipes: dict[str, Recipe], legs: Any) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        taken = int(other.getsockname()[1])
        run = legs.prepare(legs.changed(recipes["scratch"], tracking__prometheus_port=taken), "taken")
        code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0
    assert re.search(rf"metrics are not served at port {taken}: .*in use", printed)
