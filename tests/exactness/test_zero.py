"""DeepSpeed's ZeRO in several processes: the same bits in any number of chunks, and the loss of one process."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton import fork
from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.manifest import read_manifest

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed"
)
pytestmark = pytest.mark.slow
STAGES = ["zero2", "zero3"]


@pytest.fixture(scope="session")
def inside(legs: Any) -> Any:
    """What is changed in the processes, beside `legs`."""
    return importlib.import_module("zero_legs")


@pytest.fixture(scope="session")
def whole(recipes: dict[str, Recipe], legs: Any) -> Any:
    """Returns a recipe's run in two processes and one chunk, by strategy."""
    made: dict[str, Run] = {}

    def find(strategy: str) -> Run:
        if strategy not in made:
            run = made[strategy] = legs.prepare(parallel(legs, recipes["scratch"], strategy), f"{strategy}-whole")
            legs.train(run)
        return made[strategy]

    return find


def parallel(legs: Any, recipe: Recipe, strategy: str, processes: int = 2, **values: Any) -> Recipe:
    """Returns a recipe in several processes."""
    settings = {"strategy": strategy, "processes": processes, "hang_after": "30s"}
    changed: Recipe = legs.changed(recipe, training__parallel=settings, training__threads=1, **values)
    return changed


def weights(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights in a run's last checkpoint."""
    store = CheckpointStore(run)
    checkpoint = store.read(run.plan().num_steps)
    assert checkpoint is not None
    return load_file(f"{store.fetch(checkpoint, str(folder))}/model.safetensors")


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_chunks_end_on_the_bits_of_one_run(strategy: str, recipes: dict[str, Recipe], whole: Any, legs: Any) -> None:
    run = legs.prepare(parallel(legs, recipes["scratch"], strategy, chunks__count=3), f"{strategy}-3")
    legs.train(run)
    made, one = legs.final(run), legs.final(whole(strategy))
    assert legs.losses(run) == legs.losses(whole(strategy))
    assert made.meta.state == one.meta.state
    assert set(made.meta.restored.checked.values()) == {"match", "absent"}
    kept = {"model.safetensors", "scheduler.pt", "optimizer_0.zero", "optimizer_1.zero", "rng_state_1.pth"}
    assert kept <= made.manifest.files.keys()
    for name in kept - {"scheduler.pt", "rng_state_1.pth"}:
        assert made.manifest.files[name] == one.manifest.files[name], f"{name} is the same file"


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_without_the_optimizer_of_one_process_the_bits_differ(
    strategy: str, recipes: dict[str, Recipe], whole: Any, legs: Any, inside: Any
) -> None:
    run = legs.prepare(parallel(legs, recipes["scratch"], strategy, chunks__count=2), f"{strategy}-no-optimizer")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    code, printed = legs.leg(inside.without_the_optimizer_of, run.uri, 2, 1)
    assert code == 0, printed
    assert legs.final(run).meta.restored.checked["weights"] == "match"
    assert legs.final(run).meta.state["weights"] != legs.final(whole(strategy)).meta.state["weights"]


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_three_processes_among_which_no_weight_comes_out_even(
    strategy: str, recipes: dict[str, Recipe], legs: Any
) -> None:
    uneven = {"training__batch_size": 6, "training__micro_batch_size": 1, "training__epochs": 1.0}
    runs = []
    for count in (1, 2):
        recipe = parallel(legs, recipes["scratch"], strategy, 3, chunks__count=count, **uneven)
        runs.append(legs.prepare(recipe, f"{strategy}-uneven-{count}"))
        legs.train(runs[-1])
    assert legs.final(runs[0]).meta.state == legs.final(runs[1]).meta.state


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_the_loss_is_that_of_one_process(strategy: str, recipes: dict[str, Recipe], legs: Any, tmp_path: Path) -> None:
    still = {"model__from_scratch__config": {}, "training__max_grad_norm": 0.1, "training__weight_decay": 0.1}
    alone = legs.prepare(parallel(legs, recipes["scratch"], "ddp", 1, **still), f"{strategy}-alone")
    run = legs.prepare(parallel(legs, recipes["scratch"], strategy, 2, **still), f"{strategy}-both")
    for each in (alone, run):
        legs.train(each)
    ours, theirs = ([loss for _, loss in legs.losses(found)] for found in (run, alone))
    assert ours == pytest.approx(theirs, rel=2e-4)
    norms = [[line["grad_norm"] for line in legs.history(each) if "grad_norm" in line] for each in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)
    assert min(norms[1]) > 0.1, "every step is clipped"
    rates = [[line["learning_rate"] for line in legs.history(each) if "loss" in line] for each in (run, alone)]
    assert rates[0] == rates[1]
    pairs = zip(weights(run, tmp_path / "a").items(), weights(alone, tmp_path / "b").items(), strict=True)
    for (name, one), (same, other) in pairs:
        assert name == same
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_an_adapter_in_bf16(strategy: str, recipes: dict[str, Recipe], legs: Any) -> None:
    states = []
    for count in (1, 2):
        recipe = parallel(legs, recipes["lora"], strategy, training__precision="bf16", chunks__count=count)
        run = legs.prepare(recipe, f"{strategy}-lora-{count}")
        legs.train(run)
        states.append(legs.final(run))
    assert states[0].meta.state == states[1].meta.state
    assert "adapter_model.safetensors" in states[0].manifest.files
    assert "model.safetensors" not in states[0].manifest.files
    code, printed = legs.leg(legs.evaluate, run.uri)
    assert code == 0, printed


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_what_is_held_on_the_host(
    strategy: str, recipes: dict[str, Recipe], whole: Any, legs: Any, inside: Any
) -> None:
    runs = []
    for count in (1, 2):
        recipe = parallel(legs, recipes["scratch"], strategy, chunks__count=count)
        runs.append(legs.prepare(recipe, f"{strategy}-offloaded-{count}"))
        for index in range(1, count + 1):
            code, printed = legs.leg(inside.offloaded, runs[-1].uri, index)
            assert code == 0, printed
    assert legs.final(runs[0]).meta.state == legs.final(runs[1]).meta.state
    losses = [[loss for _, loss in legs.losses(run)] for run in (runs[0], whole(strategy))]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)


@needs_deepspeed
def test_a_process_killed_in_saving_is_made_good(recipes: dict[str, Recipe], whole: Any, legs: Any) -> None:
    run = legs.prepare(parallel(legs, recipes["scratch"], "zero3", chunks__count=2), "zero3-killed")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    code, printed = legs.leg(importlib.import_module("parallel_legs").killed, run.uri, 2, 1, "writing:1")
    assert code == 1, printed
    assert "rank 1 was ended by SIGKILL" in printed
    assert legs.steps(run) == [8], "without all parts there is no checkpoint"
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(whole("zero3")).meta.state


@needs_deepspeed
def test_what_it_trained_is_evaluated_and_exported(whole: Any, legs: Any) -> None:
    for stage in (legs.evaluate, legs.export):
        code, printed = legs.leg(stage, whole("zero3").uri)
        assert code == 0, printed
    assert "logits the same bit for bit" in printed
    exported = read_manifest(whole("zero3").storage, whole("zero3").path("export"))
    assert exported is not None
    assert "model.safetensors" in exported.files
    assert not [name for name in exported.files if name.startswith(("optimizer", "rng_state", "baton_state"))]


@needs_deepspeed
def test_another_strategy_is_refused(recipes: dict[str, Recipe], legs: Any) -> None:
    run = legs.prepare(parallel(legs, recipes["scratch"], "zero2", chunks__count=2), "zero2-changed")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    for strategy in ("zero3", "ddp"):
        legs.adopt(run, parallel(legs, recipes["scratch"], strategy, chunks__count=2))
        code, printed = legs.leg(legs.chunk, run.uri, 2)
        assert code == 2, printed
        assert f"strategy zero2, and this chunk has {strategy}" in printed


def test_a_chunk_without_the_package_says_so(recipes: dict[str, Recipe], legs: Any, inside: Any) -> None:
    run = legs.prepare(parallel(legs, recipes["scratch"], "zero3"), "zero3-missing")
    code, printed = legs.leg(inside.without_package, run.uri, 1)
    assert code == 2, printed
    assert "needs the package deepspeed, which is not installed" in printed


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_a_fork_takes_over_its_rate(strategy: str, recipes: dict[str, Recipe], legs: Any) -> None:
    recipe = parallel(legs, recipes["scratch"], strategy, chunks__count=3, chunks__keep__last=9)
    parent = legs.prepare(recipe, f"{strategy}-parent")
    legs.train(parent)
    states = {}
    for name, overrides in {"same": [], "slower": ["training.learning_rate=5.0e-3"]}.items():
        run = fork.fork(parent, 5, f"{strategy}-{name}", overrides).run
        legs.train(run)
        states[name] = legs.final(run).meta.state
        rates = {line["step"]: line["learning_rate"] for line in legs.history(run) if "learning_rate" in line}
        assert rates[6] == pytest.approx((1e-2 if name == "same" else 5e-3) * 0.75)
    assert states["same"] == legs.final(parent).meta.state
    assert states["slower"]["weights"] != states["same"]["weights"]


@needs_deepspeed
@pytest.mark.parametrize("strategy", STAGES)
def test_pretraining_with_momentum(strategy: str, recipes: dict[str, Recipe], legs: Any) -> None:
    values = {"training__method": "pretrain", "training__optimizer": "sgd", "training__epochs": 1.0}
    values |= {"training__optimizer_options": {"momentum": 0.9}, "model__from_scratch__config": {}}
    values["data__columns"] = {"text": "completion"}
    runs = []
    for kind, count in ((strategy, 1), (strategy, 2), ("ddp", 1)):
        recipe = parallel(legs, recipes["scratch"], kind, chunks__count=count, **values)
        runs.append(legs.prepare(recipe, f"{strategy}-pretrain-{kind}-{count}"))
        legs.train(runs[-1])
    assert legs.final(runs[0]).meta.state == legs.final(runs[1]).meta.state
    losses = [[loss for _, loss in legs.losses(run)] for run in runs[1:]]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
