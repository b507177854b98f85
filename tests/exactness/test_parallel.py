"""One run in several processes: the same rows, the same bits in any number of chunks, and what a failing one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton import fork
from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import TrialInfo, TrialScore
from baton.runs.run import Run

STRATEGIES = ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def whole(recipes: dict[str, Recipe], legs: Any) -> Any:
    """Returns a recipe's run in two processes and one chunk, by strategy."""
    made: dict[str, Run] = {}

    def find(strategy: str) -> Run:
        if strategy not in made:
            run = made[strategy] = legs.prepare(parallel(legs, recipes, strategy), f"parallel-{strategy}-whole")
            legs.train(run)
        return made[strategy]

    return find


def parallel(legs: Any, recipes: dict[str, Recipe], strategy: str, processes: int = 2, **values: Any) -> Recipe:
    """Returns the recipe with attention dropout, accumulation and a last step of one row, in several processes."""
    settings = {"strategy": strategy, "processes": processes, "hang_after": "6s"}
    changed: Recipe = legs.changed(recipes["scratch"], training__parallel=settings, training__threads=1, **values)
    return changed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_end_on_the_bits_of_one_run(strategy: str, recipes: dict[str, Recipe], whole: Any, legs: Any) -> None:
    count = 2 if strategy == "ddp" else 3
    run = legs.prepare(parallel(legs, recipes, strategy, chunks__count=count), f"parallel-{strategy}-{count}")
    legs.train(run)
    made = legs.final(run)
    assert legs.losses(run) == legs.losses(whole(strategy))
    assert made.meta.state == legs.final(whole(strategy)).meta.state
    assert set(made.meta.restored.checked.values()) == {"match", "absent"}
    assert made.meta.fingerprint.world_size == 2
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= made.manifest.files.keys()
    assert ("model.safetensors" in made.manifest.files) == (strategy == "ddp")
    assert ("pytorch_model_fsdp_0/__1_0.distcp" in made.manifest.files) == (strategy == "fsdp")


@pytest.mark.slow
def test_on_s3_chunks_end_on_the_same_bits(recipes: dict[str, Recipe], whole: Any, s3_store: str, legs: Any) -> None:
    """The process that starts the others has asked the store by then, whose client has threads that a fork lacks."""
    run = legs.prepare(parallel(legs, recipes, "ddp", store=s3_store, chunks__count=2), "parallel-s3")
    legs.train(run)
    assert legs.losses(run) == legs.losses(whole("ddp"))
    assert legs.final(run).meta.state == legs.final(whole("ddp")).meta.state


def test_checkpoints_that_follow_each_other_are_the_same_steps_in_all_processes(
    recipes: dict[str, Recipe], whole: Any, legs: Any
) -> None:
    changes = {"chunks__checkpoint_every": "continuous", "chunks__keep__last": 99}
    run = legs.prepare(parallel(legs, recipes, "ddp", **changes), "parallel-continuous")
    legs.train(run)
    assert len(run.attempts(1)[-1].save_stalls) > 1, "one that the clock of the first has called for, and the last"
    assert legs.losses(run) == legs.losses(whole("ddp"))
    assert legs.final(run).meta.state == legs.final(whole("ddp")).meta.state


@pytest.mark.slow
@pytest.mark.parametrize("warm", ["1", "0"], ids=["forked", "fresh"])
def test_all_processes_end_with_their_stage(warm: str, recipes: dict[str, Recipe], legs: Any, tmp_path: Path) -> None:
    """They would train on beside those that take their place."""
    run = legs.prepare(parallel(legs, recipes, "ddp", training__epochs=100_000), f"parallel-orphans-{warm}")
    command, told = [sys.executable, "-m", "baton.kfp.process", "train_chunk", run.uri, "1"], tmp_path / "told"
    # A file: processes that train on could not write to a pipe that nobody reads, and would end by that.
    with (
        told.open("w") as file,
        subprocess.Popen(command, env={**os.environ, "BATON_FORKSERVER": warm}, stdout=file, stderr=file) as stage,
    ):
        try:
            while "step step=2 " not in told.read_text():
                assert stage.poll() is None, told.read_text()
                time.sleep(0.1)
            below = psutil.Process(stage.pid).children(recursive=True)
        finally:
            stage.kill()
    assert len(below) >= 2, "the processes that train"
    _, left = psutil.wait_procs(below, timeout=20)
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_without_the_random_state_of_one_process_the_bits_differ(
    strategy: str, recipes: dict[str, Recipe], whole: Any, legs: Any, inside: Any
) -> None:
    run = legs.prepare(parallel(legs, recipes, strategy, chunks__count=2), f"parallel-{strategy}-no-rng")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    code, printed = legs.leg(inside.without_rng_of, run.uri, 2, 1)
    assert code == 0, printed
    assert legs.final(run).meta.state["weights"] != legs.final(whole(strategy)).meta.state["weights"]


@pytest.mark.slow
def test_each_step_has_the_rows_and_the_loss_of_one_process(
    recipes: dict[str, Recipe], legs: Any, inside: Any, tmp_path: Path
) -> None:
    rows: dict[int, dict[int, list[list[int]]]] = {}
    losses = {}
    for processes in (1, 2, 4):
        folder = tmp_path / str(processes)
        folder.mkdir()
        still = {"model__from_scratch__config": {}, "chunks__count": 2}
        run = legs.prepare(parallel(legs, recipes, "ddp", processes, **still), f"parallel-rows-{processes}")
        for index in (1, 2):
            code, printed = legs.leg(inside.recorded, run.uri, index, str(folder))
            assert code == 0, printed
        lines = {path.stem: [json.loads(line) for line in path.open()] for path in folder.iterdir()}
        assert len(lines) == processes
        rows[processes] = {
            step: sorted(row for of in lines.values() for line in of if line["step"] == step for row in line["rows"])
            for step in range(1, 16)
        }
        joins = [line["joins"] for line in lines["0"] if line["step"] == 1]
        assert joins == {1: [True] * 4, 2: [False, True], 4: [True]}[processes], "gradients are joined once a step"
        losses[processes] = [loss for _, loss in legs.losses(run)]
    assert [len(rows[1][step]) for step in range(1, 6)] == [8, 8, 8, 8, 1]
    assert rows[1] == rows[2] == rows[4]
    assert losses[2] == pytest.approx(losses[1], rel=2e-4)
    assert losses[4] == pytest.approx(losses[1], rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rank", "moment"),
    [
        pytest.param("ddp", 1, "step:10", id="ddp-training"),
        pytest.param("ddp", 0, "step:10", id="ddp-first-training"),
        pytest.param("fsdp", 1, "writing:1", id="fsdp-saving"),
        pytest.param("ddp", 1, "writing:1", id="ddp-saving"),
        pytest.param("ddp", 0, "phase:commit", id="ddp-before-commit"),
        pytest.param("fsdp", 0, "sending:3", id="fsdp-sending"),
    ],
)
def test_a_killed_process_ends_the_chunk_with_one_message_and_is_made_good(
    strategy: str, rank: int, moment: str, recipes: dict[str, Recipe], whole: Any, legs: Any, inside: Any
) -> None:
    recipe = parallel(legs, recipes, strategy, chunks__count=2)
    run = legs.prepare(recipe, f"parallel-{strategy}-killed-{rank}-{moment.replace(':', '-')}")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    code, printed = legs.leg(inside.killed, run.uri, 2, rank, moment)
    assert code == 1, printed
    assert [line for line in printed.splitlines() if " ERROR baton" in line and "was ended by" in line], printed
    assert f"rank {rank} was ended by SIGKILL" in printed
    assert printed.count("was ended by SIGKILL") == 2, "as an event and for people"
    committed = [checkpoint.step for checkpoint in CheckpointStore(run).committed()]
    assert committed == [8]
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(whole(strategy)).meta.state


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_its_step(
    recipes: dict[str, Recipe], whole: Any, legs: Any, inside: Any
) -> None:
    run = legs.prepare(parallel(legs, recipes, "ddp", chunks__count=2), "parallel-hanging")
    code, printed = legs.leg(inside.hanging, run.uri, 1, 1, 7)
    assert code == 1, printed
    assert "rank 1 hangs in step 7" in printed
    for rank in (0, 1):
        assert f"rank {rank}, process" in printed
    assert "in act" in printed or "in <lambda>" in printed, "the stack shows where it stands"
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(whole("ddp")).meta.state


@pytest.mark.slow
def test_all_processes_save_at_one_step_when_the_machine_is_taken_away(
    recipes: dict[str, Recipe], whole: Any, legs: Any, inside: Any
) -> None:
    run = legs.prepare(parallel(legs, recipes, "ddp", chunks__count=2, chunks__spare=1), "parallel-interrupted")
    code, printed = legs.leg(inside.interrupted, run.uri, 1, 3)
    assert code == 0, printed
    assert "partial" in printed
    (step,) = legs.steps(run)
    assert 3 <= step < 8
    for index in (2, 3):
        assert legs.leg(legs.chunk, run.uri, index)[0] == 0
    assert legs.final(run).meta.state == legs.final(whole("ddp")).meta.state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [("ddp", 2, 1), ("ddp", 1, 2), ("fsdp", 2, 4)],
    ids=["ddp-2-1", "ddp-1-2", "fsdp-2-4"],
)
def test_another_number_of_processes_goes_on_consistently(
    strategy: str, before: int, after: int, recipes: dict[str, Recipe], legs: Any
) -> None:
    still = {"model__from_scratch__config": {}, "chunks__count": 2}
    name = f"parallel-{strategy}-{before}-{after}"
    run = legs.prepare(parallel(legs, recipes, strategy, before, **still), name)
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    strict = parallel(legs, recipes, strategy, after, **still, chunks__exactness="bitwise")
    legs.adopt(run, strict)
    code, printed = legs.leg(legs.chunk, run.uri, 2)
    assert code == 1
    assert f"world_size: {before} → {after}" in printed
    legs.adopt(run, parallel(legs, recipes, strategy, after, **still))
    code, printed = legs.leg(legs.chunk, run.uri, 2)
    assert code == 0, printed
    restored = legs.final(run).meta.restored
    assert restored.level == "consistent"
    assert restored.checked["rng"] == "of other processes"
    assert {restored.checked[part] for part in ("weights", "optimizer", "scheduler")} == {"match"}
    same = legs.prepare(parallel(legs, recipes, "ddp", 2, **still), f"{name}-same")
    legs.train(same)
    ours, theirs = ([loss for _, loss in legs.losses(found)] for found in (run, same))
    assert ours == pytest.approx(theirs, rel=2e-4)


@pytest.mark.slow
def test_what_was_trained_in_shards_is_evaluated_and_exported_whole(whole: Any, legs: Any) -> None:
    run = whole("fsdp")
    for stage in (legs.evaluate, legs.export):
        code, printed = legs.leg(stage, run.uri)
        assert code == 0, printed
    assert "logits the same bit for bit" in printed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_trial_is_scored_by_all_processes_and_its_bits_stay(
    strategy: str, recipes: dict[str, Recipe], whole: Any, legs: Any
) -> None:
    """A score that is lost is measured again by as many processes, from the checkpoint, to the same digit."""
    run = legs.prepare(parallel(legs, recipes, strategy, chunks__count=2), f"parallel-{strategy}-trial")
    run.put(TrialInfo.NAME, {"sweep": "s", "id": "t000", "values": {}, "metric": "eval_loss"})
    scores = []
    for index in (1, 2):
        code, printed = legs.leg(legs.chunk, run.uri, index)
        assert code == 0, printed
        assert "INFO baton: step " in printed
        before = run.require(TrialScore.file_name(index))
        assert before["metrics"]["eval_num_tokens"] > 0
        run.storage.remove(run.path(TrialScore.file_name(index)))
        code, printed = legs.leg(legs.chunk, run.uri, index)
        assert code == 0, printed
        after = run.require(TrialScore.file_name(index))
        assert (after["step"], after["metrics"]) == (before["step"], before["metrics"])
        assert run.attempts(index)[-1].outcome == "already_done"
        assert "INFO baton: step " not in printed
        scores.append(after["value"])
    assert scores[0] != scores[1]
    assert legs.final(run).meta.state == legs.final(whole(strategy)).meta.state


@pytest.mark.slow
def test_a_fork_of_shards_ends_on_its_parents_bits_and_takes_over_a_rate(
    recipes: dict[str, Recipe], whole: Any, legs: Any
) -> None:
    kept = {"chunks__count": 3, "chunks__keep__last": 9}
    parent = legs.prepare(parallel(legs, recipes, "fsdp", **kept), "parallel-fsdp-parent")
    legs.train(parent)
    same, other = (
        legs.prepare(fork.fork(parent, 5, name, changes).recipe, name)
        for name, changes in (("parallel-fsdp-same", ()), ("parallel-fsdp-rate", ("training.learning_rate=5.0e-3",)))
    )
    for run in (same, other):
        legs.train(run)
        assert set(legs.final(run, 10).meta.restored.checked.values()) == {"match", "absent"}
    assert legs.final(same).meta.state == legs.final(whole("fsdp")).meta.state
    rates, before = (
        {entry["step"]: entry["learning_rate"] for entry in legs.history(run) if "learning_rate" in entry}
        for run in (other, same)
    )
    assert [rates[step] for step in range(6, 16)] == pytest.approx([before[step] / 2 for step in range(6, 16)])
    ours, theirs = dict(legs.losses(other)), dict(legs.losses(same))
    assert ours[6] == theirs[6], "the first step's forward pass has seen no new rate yet"
    assert all(ours[step] != theirs[step] for step in range(7, 16))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["torch.distributed.run", "--nproc-per-node", "2", "--module"]])
def test_fresh_interpreters_and_torchrun_give_the_same_bits(
    launcher: list[str], recipes: dict[str, Recipe], whole: Any, legs: Any
) -> None:
    run = legs.prepare(parallel(legs, recipes, "ddp", chunks__count=2), f"parallel-fresh-{len(launcher)}")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    command = [sys.executable, "-m", *launcher, "baton.kfp.process", "train_chunk", run.uri, "2"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert legs.final(run).meta.state == legs.final(whole("ddp")).meta.state
