"""Virtual workers: what would leave a trace of the processes' number does, and killed processes do not."""

from __future__ import annotations

import importlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.outcomes import TrialInfo, TrialScore
from baton.runs.run import Run

SKIPPING = {"callbacks": [{"use": "tests.resume.own:Skipping"}]}
"""Some workers do not use some of the weights."""


@pytest.fixture(scope="session")
def controls(legs: Any) -> Any:
    """What is changed in the processes."""
    return importlib.import_module("virtual_legs")


@pytest.fixture(scope="session")
def virtual(recipes: dict[str, Recipe], legs: Any) -> Any:
    """Returns a recipe for four workers with two passes each, and a last step of one row, in so many processes."""

    def find(processes: int = 1, **values: Any) -> Recipe:
        settings = {"virtual_workers": 4, "processes": processes, "hang_after": "60s"}
        more = {"training__threads": 1, "training__micro_batch_size": 1, **values}
        changed: Recipe = legs.changed(recipes["scratch"], training__parallel=settings, **more)
        return changed

    return find


@pytest.fixture(scope="session")
def trained(virtual: Any, legs: Any) -> Any:
    """Returns the run of a recipe in one chunk of so many processes, by a function of a process's own."""
    made: dict[str, Run] = {}

    def train(name: str, processes: int, leg: Any = None, *given: Any, **values: Any) -> Run:
        name = f"virtual-{name}-{processes}"
        if name not in made:
            run = made[name] = legs.prepare(virtual(processes, **values), name)
            code, printed = legs.leg(leg or legs.chunk, run.uri, 1, *given)
            assert code == 0, printed
        return made[name]

    return train


@pytest.mark.parametrize(
    "control", ["seeds", *(pytest.param(control, marks=pytest.mark.slow) for control in ("sums", "tokens"))]
)
@pytest.mark.parametrize(
    "hooks", [pytest.param({}, id="all"), pytest.param(SKIPPING, id="unused", marks=pytest.mark.slow)]
)
def test_what_follows_the_processes_leaves_a_trace(
    control: str, hooks: dict[str, Any], trained: Any, legs: Any, controls: Any
) -> None:
    """Negative controls: in four processes, where the orders differ."""
    kind = "unused" if hooks else "all"
    whole = trained(kind, 1, hooks=hooks)
    assert legs.final(trained(kind, 4, hooks=hooks)).meta.state == legs.final(whole).meta.state
    by_rank = {n: trained(f"{kind}-{control}", n, controls.CONTROLS[control], hooks=hooks) for n in (1, 4)}
    right, one, four = (legs.final(run).meta.state["weights"] for run in (whole, by_rank[1], by_rank[4]))
    assert one != four
    assert (one == right) == (control == "tokens"), "one process has all tokens"
    assert (four == right) == (control == "seeds"), "each of four processes is one worker"
    print(f"virtual control | {control} | {kind} | right {right[:8]} | ×1 {one[:8]} | ×4 {four[:8]}")
    if control == "sums":
        close = [loss for _, loss in legs.losses(whole)]
        for run in by_rank.values():
            assert [loss for _, loss in legs.losses(run)] == pytest.approx(close, rel=1e-3)


@pytest.mark.slow
def test_some_weights_are_used_by_some_workers_alone(trained: Any, legs: Any, controls: Any, tmp_path: Path) -> None:
    run = trained("noted", 4, controls.noting_unused, str(tmp_path), hooks=SKIPPING)
    assert legs.final(run).meta.state == legs.final(trained("unused", 1, hooks=SKIPPING)).meta.state
    counts = {path.name for path in tmp_path.iterdir()}
    assert {"0", "4"} < counts, "the last feed-forward part and its norm, or all of a worker that has no row"


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_on_the_bits_of_one_process(
    virtual: Any, trained: Any, legs: Any, inside: Any, controls: Any
) -> None:
    """Three chunks, each killed twice and resumed by another number of processes, fewer and more in turn."""
    settings = {"chunks__count": 3, "chunks__checkpoint_every": 2, "chunks__wait_for_commit": True}
    run = legs.prepare(virtual(4, **settings), "virtual-killed")
    lost, resumed = [], []
    for index, processes, leg, *given in [
        (1, 4, inside.killed, 3, "step:4"),
        (1, 2, inside.killed, 0, "writing:1"),
        (1, 1, legs.chunk),
        (2, 4, controls.launcher_killed, 8),
        (2, 1, legs.chunk, (), "step:9"),
        (2, 4, legs.chunk),
        (3, 2, inside.killed, 0, "phase:commit"),
        (3, 4, inside.killed, 1, "step:14"),
        (3, 2, legs.chunk),
    ]:
        legs.adopt(run, virtual(processes, **settings))
        code, printed = legs.leg(leg, run.uri, index, *given)
        if leg is legs.chunk and not given:
            assert code == 0, printed
            made = legs.final(run, run.plan().targets[index - 1])
            assert made.meta.restored.level == "bitwise"
            assert set(made.meta.restored.checked.values()) == {"match", "absent"}
            resumed.append((made.meta.restored.step, made.meta.fingerprint.world_size))
        else:
            assert code in (1, -signal.SIGKILL), printed
            lost.append(code)
    assert lost == [1, 1, -signal.SIGKILL, -signal.SIGKILL, 1, 1]
    assert resumed == [(2, 1), (8, 4), (12, 2)]
    whole = trained("all", 1, hooks={})
    assert legs.losses(run) == legs.losses(whole)
    assert legs.final(run).meta.state == legs.final(whole).meta.state
    print("virtual, killed six times:", lost, resumed, legs.final(run).meta.state["state"][:8])


@pytest.mark.slow
def test_a_machine_that_is_taken_away_is_made_good_by_fewer(virtual: Any, trained: Any, legs: Any, inside: Any) -> None:
    settings = {"chunks__count": 1, "chunks__spare": 1}
    run = legs.prepare(virtual(4, **settings), "virtual-preempted")
    code, printed = legs.leg(inside.interrupted, run.uri, 1, 3)
    assert code == 0, printed
    assert "partial" in printed
    legs.adopt(run, virtual(2, **settings))
    assert legs.leg(legs.chunk, run.uri, 2)[0] == 0
    assert legs.final(run).meta.state == legs.final(trained("all", 1, hooks={})).meta.state


@pytest.mark.slow
def test_processes_that_no_worker_is_left_for_stay_idle(trained: Any, legs: Any) -> None:
    run = trained("idle", 3)
    assert legs.final(run).meta.fingerprint.world_size == 2
    assert legs.final(run).meta.state == legs.final(trained("all", 1, hooks={})).meta.state


@pytest.mark.slow
def test_each_step_has_the_rows_of_the_recipe_and_its_loss(
    trained: Any, recipes: dict[str, Recipe], legs: Any, inside: Any, tmp_path: Path
) -> None:
    """Those of the same recipe in as many processes as there are workers, which each have those passes."""
    still = {"model__from_scratch__config": {}, "training__threads": 1}
    rows, losses = [], []
    for number, virtual_workers in ((1, 4), (4, 4), (4, None)):
        folder = tmp_path / f"{number}-{virtual_workers}"
        folder.mkdir()
        if virtual_workers:
            run = trained("rows", number, inside.recorded, str(folder), **still)
        else:
            settings = {"training__parallel": {"processes": 4}, "training__micro_batch_size": 1}
            recipe = legs.changed(recipes["scratch"], **settings, **still)
            run = legs.prepare(recipe, "virtual-rows-ddp")
            code, printed = legs.leg(inside.recorded, run.uri, 1, str(folder))
            assert code == 0, printed
        lines = [json.loads(line) for path in folder.iterdir() for line in path.open()]
        rows.append({step: sorted(x for y in lines if y["step"] == step for x in y["rows"]) for step in range(1, 16)})
        losses.append([loss for _, loss in legs.losses(run)])
    assert [len(rows[0][step]) for step in range(1, 16)] == [8, 8, 8, 8, 1] * 3
    assert rows[0] == rows[1] == rows[2]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=2e-4)


@pytest.mark.slow
def test_a_trial_has_the_score_of_one_process(virtual: Any, legs: Any) -> None:
    scores = []
    for processes in (1, 4):
        run = legs.prepare(virtual(processes), f"virtual-trial-{processes}")
        run.put(TrialInfo.NAME, {"sweep": "s", "id": "t000", "values": {}, "metric": "eval_loss"})
        code, printed = legs.leg(legs.chunk, run.uri, 1)
        assert code == 0, printed
        scores.append(run.require(TrialScore.file_name(1))["value"])
    assert scores[0] == scores[1]
