"""Kills at random moments of every phase: each run ends on the bits of one that nobody disturbed."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.cli.prove import print_table, verdict
from baton.local.forkserver import ForkedProcess
from baton.prove.drill import PHASES, Drill
from baton.recipe.recipe import Recipe

CHUNKS = {"chunks__count": 3, "chunks__checkpoint_every": 2, "chunks__wait_for_commit": False}
KEEP = {"last": 2}


@pytest.fixture
def drill(recipes: dict[str, Recipe], legs: Any) -> Callable[..., dict[str, Any]]:
    """Drills a recipe by name, in forked processes."""

    def run(name: str, kills: int, *, prefix: str, seed: int = 1, store: str | None = None, **options: Any) -> Any:
        changes = {**CHUNKS, "chunks__keep": KEEP, **({"store": store} if store else {})}
        recipe = legs.changed(recipes[name], **changes)
        return Drill(recipe, kills=kills, seed=seed, name=prefix, **{"launch": ForkedProcess, **options}).run()

    return run


def _require_exact(found: dict[str, Any], kills: int) -> None:
    assert len(found["kills"]) == kills
    assert found["unreachable"] == []
    assert all(count["hit"] for count in found["phases"].values()), found["phases"]
    assert found["phases"].keys() == set(PHASES)
    assert [run["difference"] for run in found["runs"]] == [None] * len(found["runs"])
    assert [run["problems"] for run in found["runs"]] == [[]] * len(found["runs"])
    assert {run["state_digest"] for run in found["runs"]} == {found["undisturbed"]["state_digest"]}
    assert all(run["losses"] == found["undisturbed"]["losses"] for run in found["runs"])
    assert all(run["checkpoints"] for run in found["runs"])
    assert found["exact"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_twenty_kills_lose_nothing(drill: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    pids: list[int] = []

    def launch(module: str, arguments: Sequence[str]) -> Any:
        process = ForkedProcess(module, arguments)
        pids.append(process.pid)
        return process

    found = drill("lora", 20, prefix="drill-twenty", launch=launch)
    _require_exact(found, 20)
    assert {kill["chunk"] for kill in found["kills"]} == {1, 2, 3}
    assert any(kill["seconds_to_training"] for kill in found["kills"])
    staged = (*glob.glob("/dev/shm/baton-*"), *glob.glob(f"{tempfile.gettempdir()}/baton-*"))
    assert not [folder for folder in staged if folder.split("-")[1] in map(str, pids)]
    print_table(found)
    *rows, last = capsys.readouterr().out.strip().splitlines()
    assert sum(row.startswith("│ ") for row in rows) >= 20
    assert last.startswith(f"exact: after 20 kill(s) in {len(found['runs'])} run(s)")


@pytest.mark.slow
def test_without_the_random_state_a_drill_finds_the_difference(drill: Callable[..., dict[str, Any]]) -> None:
    found = drill("lora", 1, prefix="drill-no-rng", leave_out=("rng",))
    assert not found["exact"]
    assert found["runs"][0]["difference"]["what"] == "loss"
    assert found["runs"][0]["state_digest"] != found["undisturbed"]["state_digest"]
    assert found["runs"][0]["problems"] == []
    assert verdict(found).startswith("NOT exact")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scratch", "lora"])
def test_two_hundred_kills_lose_nothing(name: str, drill: Callable[..., dict[str, Any]]) -> None:
    _require_exact(drill(name, 200, prefix=f"drill-{name}", seed=2), 200)


@pytest.mark.slow
@pytest.mark.s3
def test_two_hundred_kills_on_s3_lose_nothing(drill: Callable[..., dict[str, Any]], s3_store: str) -> None:
    _require_exact(drill("lora", 200, prefix="drill-s3", seed=3, store=s3_store), 200)
