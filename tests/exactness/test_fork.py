"""A fork ends on its parent's bits where nothing is changed, and takes over what is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton import fork
from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError, UserError
from baton.recipe.recipe import Recipe
from baton.runs.documents import ForkOrigin
from baton.runs.run import Run
from baton.store import bundle

STEPS = 15


@pytest.fixture(scope="module")
def parent(recipes: dict[str, Recipe], legs: Any) -> Run:
    """The recipe `scratch` in three chunks of five steps, all its checkpoints kept."""
    recipe = legs.changed(recipes["scratch"], chunks__count=3, chunks__keep__last=9)
    run: Run = legs.prepare(recipe, "forked")
    legs.train(run)
    return run


@pytest.fixture
def forked(parent: Run, legs: Any) -> Callable[..., Run]:
    """Forks the parent at step 5 and trains the fork to its end, as the pipeline does: from the data split on."""

    def make(name: str, *overrides: str, step: int = 5, of: Run | None = None) -> Run:
        made = fork.fork(of or parent, step, name, overrides)
        again: Run = legs.prepare(made.recipe, name)
        legs.train(again)
        return again

    return make


def files(run: Run, step: int, name: str, scratch: Any) -> Any:
    """Reads a file of a checkpoint with torch."""
    store = CheckpointStore(run)
    checkpoint = store.read(step)
    assert checkpoint is not None
    local = f"{scratch}/{run.name}-{step}-{name}"
    run.storage.download(checkpoint.manifest.path(store.prefix(step), name), local)
    return torch.load(local, weights_only=True)


def test_a_fork_with_nothing_changed_ends_on_its_parents_bits(
    parent: Run, forked: Callable[..., Run], legs: Any
) -> None:
    run = forked("same")
    assert legs.final(run).meta.state == legs.final(parent).meta.state
    assert legs.losses(run) == legs.losses(parent)
    assert legs.steps(run) == [15, 10, 5]
    start = legs.final(run, 5).meta
    assert start.forked_from == ForkOrigin(run_uri=parent.uri, step=5, digest=start.digest, changed={})
    assert set(legs.final(run, 10).meta.restored.checked.values()) == {"match", "absent"}


def test_a_checkpoint_is_forked_whose_files_were_copied_from_earlier_ones(
    recipes: dict[str, Recipe], legs: Any
) -> None:
    recipe = legs.changed(recipes["scratch"], chunks__count=5, chunks__keep__last=9)
    parent = legs.prepare(recipe, "copied")
    legs.train(parent)
    of_parent = legs.final(parent, 12)
    assert any("origin" in entry for entry in of_parent.manifest.files.values())

    again = legs.prepare(fork.fork(parent, 12, "of-copies", []).recipe, "of-copies")
    of_fork = legs.final(again, 12)
    assert not any("origin" in entry for entry in of_fork.manifest.files.values())
    assert of_fork.meta.state == of_parent.meta.state


@pytest.mark.slow
def test_other_cuts_and_what_decides_no_bits_change_none(parent: Run, forked: Callable[..., Run], legs: Any) -> None:
    run = forked("recut", "chunks.count=2", "chunks.checkpoint_every=3", "evaluation.samples=1", step=10)
    assert legs.final(run).meta.state == legs.final(parent).meta.state
    assert run.plan().targets == (8, 15)
    assert set(run.require("fork.json")["changed"]) == {
        "chunks.checkpoint_every",
        "chunks.count",
        "evaluation.samples",
    }


def test_a_learning_rate_holds_from_the_forks_first_step(
    parent: Run, forked: Callable[..., Run], legs: Any, tmp_path: Any
) -> None:
    run = forked("half-rate", "training.learning_rate=5.0e-3", "training.weight_decay=0.1")
    before, after = legs.history(parent), legs.history(run)
    rates = {entry["step"]: entry["learning_rate"] for entry in after if "learning_rate" in entry}
    assert rates[5] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * 4 / 15))), "logged before the fork"
    for step in range(6, STEPS + 1):  # a cosine over 15 steps, and what is logged is what the step used
        assert rates[step] == pytest.approx(5e-3 * 0.5 * (1 + math.cos(math.pi * (step - 1) / 15)))
    assert [entry for entry in after if entry["step"] <= 5] == [entry for entry in before if entry["step"] <= 5]
    losses, old = dict(legs.losses(run)), dict(legs.losses(parent))
    assert losses[6] == old[6], "the first step's forward pass has seen no new rate yet"
    assert all(losses[step] != old[step] for step in range(7, STEPS + 1))
    optimizer = files(run, 10, "optimizer.pt", tmp_path)
    assert {group["weight_decay"] for group in optimizer["param_groups"] if group["weight_decay"]} == {0.1}
    assert {group["initial_lr"] for group in optimizer["param_groups"]} == {5e-3}
    assert files(run, 10, "scheduler.pt", tmp_path)["base_lrs"] == [5e-3] * len(optimizer["param_groups"])
    assert set(legs.final(run, 10).meta.restored.checked.values()) == {"match", "absent"}


@pytest.mark.slow
def test_another_schedule_and_a_longer_run_count_from_step_0(forked: Callable[..., Run], legs: Any) -> None:
    run = forked("longer", "training.lr_scheduler=linear", "training.warmup_steps=10", "training.epochs=4")
    rates = {entry["step"]: entry["learning_rate"] for entry in legs.history(run) if "learning_rate" in entry}
    assert max(rates) == 20
    assert rates[6] == pytest.approx(1e-2 * 5 / 10), "half of the warm-up"
    assert rates[11] == pytest.approx(1e-2)
    assert rates[16] == pytest.approx(1e-2 * 0.5), "half way down from step 10 to 20"
    assert run.plan().targets == (7, 14, 20)


@pytest.mark.slow
def test_evaluation_and_chunks_are_the_forks(forked: Callable[..., Run], parent: Run, legs: Any) -> None:
    run = forked("evaluated", "evaluation.every=3", "chunks.count=2", "training.micro_batch_size=4")
    evaluated = [entry["step"] for entry in legs.history(run) if "eval_loss" in entry]
    assert evaluated == [4, 6, 9, 12, 15]
    assert run.plan().targets == (8, 15)
    seen = [entry["step"] for entry in legs.history(parent) if "eval_loss" in entry]
    assert seen == [4, 8, 12, 15]


@pytest.mark.slow
def test_a_fork_of_a_fork_takes_over_what_neither_has_trained_with_yet(
    parent: Run, forked: Callable[..., Run], legs: Any
) -> None:
    first = fork.fork(parent, 5, "first", ["training.learning_rate=5.0e-3"]).run
    second = forked("second", of=first)
    direct = forked("direct", "training.learning_rate=5.0e-3")
    back = forked("back", "training.learning_rate=1.0e-2", of=first)
    assert legs.final(second).meta.state == legs.final(direct).meta.state
    assert legs.final(second).meta.state != legs.final(parent).meta.state
    assert legs.final(back).meta.state == legs.final(parent).meta.state
    later = forked("later", of=direct, step=10)
    assert legs.final(later).meta.state == legs.final(direct).meta.state


@pytest.mark.slow
def test_the_parent_may_be_deleted(recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any) -> None:
    recipe = legs.changed(recipes["scratch"], chunks__checkpoint_every=5, chunks__wait_for_commit=True)
    run = legs.prepare(recipe, "to-be-deleted")
    legs.train(run)
    for warm, name in ((True, "orphan"), (False, "cold-orphan")):
        fork.fork(run, None if not warm else 10, name, warm=warm)
    shutil.rmtree(run.storage.key(run.path()))
    for name in ("orphan", "cold-orphan"):
        orphan = legs.prepare(Run(run.storage, name).recipe(), name)
        legs.train(orphan)
    assert legs.final(Run(run.storage, "orphan")).meta.state == legs.final(undisturbed["scratch"]).meta.state


@pytest.mark.slow
def test_a_cold_fork_starts_at_step_0_with_its_parents_weights(undisturbed: dict[str, Run], legs: Any) -> None:
    whole = undisturbed["scratch"]
    made = fork.fork(whole, 15, "scratch-cold", ["training.learning_rate=1.0e-9", "seed=3"], warm=False)
    assert made.recipe.model.from_scratch is None
    start = bundle.file_sha256(f"{made.recipe.model.base}/model.safetensors")
    assert start == legs.final(whole).manifest.files["model.safetensors"]["sha256"]
    run = legs.prepare(made.recipe, "scratch-cold")
    legs.train(run)
    assert [entry["step"] for entry in legs.history(run) if "loss" in entry] == list(range(1, 16))
    assert run.require("fork.json")["warm"] is False
    rates = [entry["learning_rate"] for entry in legs.history(run) if "learning_rate" in entry]
    assert rates[0] == 1e-9, "a new schedule, from its first step"


@pytest.mark.slow
def test_a_cold_fork_of_an_adapter_folds_it_into_its_base(undisturbed: dict[str, Run], base_model: str) -> None:
    whole = undisturbed["lora"]
    made = fork.fork(whole, 15, "lora-cold", ["adapter.r=2"], warm=False)
    store = CheckpointStore(whole)
    checkpoint = store.read(15)
    assert checkpoint is not None
    adapter = load_file(store.storage.key(checkpoint.manifest.path(store.prefix(15), "adapter_model.safetensors")))
    name = "model.layers.0.self_attn.q_proj"
    up, down = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
    before = load_file(f"{base_model}/model.safetensors")[f"{name}.weight"]
    after = load_file(f"{made.recipe.model.base}/model.safetensors")[f"{name}.weight"]
    assert torch.count_nonzero(up) > 0
    expected = before + 2 * (up @ down)  # alpha 8 over r 4
    torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
    assert (after - before).abs().max() > 1e-4, "what rounding does not explain"


@pytest.mark.slow
def test_an_adapters_shape_needs_a_cold_fork(undisturbed: dict[str, Run]) -> None:
    with pytest.raises(UserError, match=r"adapter\.r: the adapter's weights have the old shape"):
        fork.fork(undisturbed["lora"], 15, "refused", ["adapter.r=2"])


def test_what_the_saved_state_is_made_of_cannot_be_changed(parent: Run) -> None:
    with pytest.raises(UserError) as caught:
        fork.fork(parent, 5, "refused", ["training.batch_size=4", "seed=1", "model.from_scratch.hidden_size=64"])
    said = str(caught.value)
    assert "training.batch_size: the place in the data is counted in batches of this size" in said
    assert "seed: it decides the order of rows" in said
    assert "model.from_scratch.hidden_size: " in said
    assert "--weights-only" in said
    assert Run(parent.storage, "refused").raw("fork.json") is None


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("training.optimizer=sgd", "the optimizer's state belongs to another one"),
        ("training.lr_scheduler=reduce_lr_on_plateau", "the state at that step fits the old value"),
        ("data.max_length=64", "it decides the rows and tokens"),
        ("data.source=other.jsonl", "it decides the rows and tokens"),
        ("training.early_stopping={patience: 2}", "its counter is part of the state"),
        ("store.uri=elsewhere", "a fork stays in its parent's store"),
    ],
    ids=lambda value: value.partition("=")[0],
)
def test_each_refused_setting_has_its_reason(parent: Run, override: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        fork.fork(parent, 5, "refused", [override])


def test_a_shorter_run_must_reach_the_step(parent: Run) -> None:
    with pytest.raises(UserError, match="would end at step 5, before step 10"):
        fork.fork(parent, 10, "short", ["training.epochs=1"])


def test_a_step_that_is_not_there_is_named_with_those_that_are(parent: Run) -> None:
    with pytest.raises(UserError, match=r"no checkpoint of step 7; it has 5, 10, 15"):
        fork.fork(parent, 7, "missing")


def test_a_name_of_another_run_is_refused(parent: Run) -> None:
    Run(parent.storage, "somebody").create(parent.recipe())
    for name in ("forked", "somebody"):
        with pytest.raises(UserError, match="exists and is not a fork"):
            fork.fork(parent, 5, name)


def test_a_damaged_parent_is_refused(recipes: dict[str, Recipe], legs: Any) -> None:
    recipe = legs.changed(recipes["scratch"], chunks__checkpoint_every=5, chunks__wait_for_commit=True)
    run = legs.prepare(recipe, "damaged-parent")
    legs.train(run)
    store, manifest = CheckpointStore(run), legs.final(run).manifest
    path = manifest.path(store.prefix(15), "optimizer.pt")
    data = run.storage.read(path)
    run.storage.write(path, data[:99] + bytes([data[99] ^ 1]) + data[100:])
    with pytest.raises(DamagedError, match=r"optimizer.pt: SHA-256 is"):
        fork.fork(run, 15, "of-damaged")
    assert Run(run.storage, "of-damaged").raw("fork.json") is None
    assert fork.fork(run, None, "of-damaged").step == 10


def test_a_fork_without_its_start_does_not_begin_from_nothing(parent: Run, legs: Any) -> None:
    run = fork.fork(parent, 5, "beheaded").run
    shutil.rmtree(run.storage.key(run.path("checkpoints")))
    code, printed = legs.leg(legs.chunk, run.uri, 2)
    assert code != 0
    assert "has no whole checkpoint to resume from" in printed
    fork.fork(parent, 5, "beheaded")
    assert legs.leg(legs.chunk, run.uri, 2)[0] == 0


def test_the_checkpoint_stage_passes_over_chunks_before_the_fork(parent: Run, legs: Any) -> None:
    run = fork.fork(parent, 10, "passing").run
    for index in (1, 2, 3):
        for stage in (legs.chunk, legs.verify_chunk):
            code, printed = legs.leg(stage, run.uri, index)
            assert code == 0, printed
    assert run.raw("proof/chunk-001.json") is None
    assert run.require("proof/chunk-002.json")["forked_from"]["run_uri"] == parent.uri
    assert run.require("proof/chunk-003.json")["parent_step"] == 10
    json.dumps(run.require("fork.json"))


@pytest.mark.slow
@pytest.mark.s3
def test_a_fork_on_s3_ends_on_the_same_bits(
    s3_store: str, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    chunks = {"chunks__checkpoint_every": 10, "chunks__wait_for_commit": True}
    recipe = legs.changed(recipes["scratch"], store=s3_store, **chunks)
    legs.train(legs.prepare(recipe, "s3-parent"))
    run = fork.fork(Run.open(f"{s3_store}/runs/s3-parent"), 10, "s3-child").run
    legs.train(run)
    assert legs.final(run).meta.state == legs.final(undisturbed["scratch"]).meta.state
