"""Methods in several processes: what two of them learn in a step is what one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from baton.checkpoint import store
from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness import matrix
from tests.exactness.matrix import WRITES, Cell, Changes, adapter, training

pytestmark = pytest.mark.slow


@pytest.fixture
def prepared(tmp_path: Path, base_model: str) -> Any:
    """Returns a method's recipe, on a store of the test's own."""
    source = matrix.write_rows(tmp_path)

    def find(method: str, changes: Changes, steps: int) -> Recipe:
        cell = Cell(method, "full", "two processes", changes, steps=steps)
        return matrix.recipe(cell, str(tmp_path / "store"), base_model, source)

    return find


@pytest.fixture
def trained(prepared: Any, legs: Any) -> Any:
    """Returns the run of a method's recipe, trained by a function of a process's own."""

    def train(method: str, name: str, changes: Changes, steps: int, chunk: Any = None, *given: Any) -> Run:
        run: Run = legs.prepare(prepared(method, changes, steps), name)
        code, printed = legs.leg(chunk or legs.chunk, run.uri, 1, *given)
        assert code == 0, printed
        return run

    return train


def weights(run: Run, legs: Any, name: str = "model") -> dict[str, torch.Tensor]:
    """Returns the weights that a run ended on."""
    manifest, step = legs.final(run).manifest, run.plan().num_steps
    path = f"{manifest.path(CheckpointStore(run).prefix(step))}/{name}.safetensors"
    return load(run.storage.read(path))


def alike(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Tells whether weights are the same up to rounding."""
    same = (torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4) for name in theirs)
    return ours.keys() == theirs.keys() and all(same)


def scores(run: Run, legs: Any) -> list[dict[str, float]]:
    """Returns the figures of each evaluation, without those of the clock, of padding, and of rows that fill up."""
    others = ("_runtime", "_per_second", "draws", "num_tokens", "logits/chosen", "logits/rejected")
    found = [entry for entry in legs.history(run) if "eval_loss" in entry]
    assert len(found) == 2
    return [{key: value for key, value in entry.items() if not key.endswith(others)} for entry in found]


@pytest.mark.parametrize(
    ("method", "micro", "rows"),
    [
        # Not pretrain, whose rows are joined: it is sft on longer ones.
        *(pytest.param(name, 4, 13, id=name) for name in matrix.READS if name != "pretrain"),
        pytest.param("dpo", 4, 15, id="dpo-three-left"),
    ],
)
def test_losses_and_scores_are_those_of_one_process(
    method: str, micro: int, rows: int, trained: Any, legs: Any
) -> None:
    """The last step of a pass has a row or three, so that a process has none of its own or fewer than the other; the
    last round of an evaluation has one (of KTO two)."""
    data = {"max_samples": rows + 5, "split": {"eval": 5}}
    judged: Changes = {"data": data, "evaluation": {"every": 4}}
    if method == "sft":
        judged["hooks"] = {"metrics": [{"use": "tests.resume.own:hits"}]}
    one = trained(method, "one", {**judged, **training(micro_batch_size=micro)}, 8)
    assert one.plan().rows == (2 * rows if method == "kto" else rows)
    theirs = [loss for _, loss in legs.losses(one)]
    assert len(set(theirs)) == 8
    for strategy in ("ddp", "fsdp"):
        both = training(parallel={"strategy": strategy, "processes": 2}, micro_batch_size=2)
        two = trained(method, strategy, {**judged, **both}, 8)
        assert [loss for _, loss in legs.losses(two)] == pytest.approx(theirs, rel=2e-4, abs=1e-5)
        for ours, figures in zip(scores(two, legs), scores(one, legs), strict=True):
            assert ours == pytest.approx(figures, rel=2e-4, abs=1e-5)


@pytest.mark.parametrize(("method", "strategy"), [("grpo", "ddp"), ("grpo", "fsdp"), ("rloo", "ddp"), ("rloo", "fsdp")])
def test_completions_of_all_processes_are_compared_in_their_groups(
    method: str, strategy: str, trained: Any, legs: Any, inside: Any, tmp_path: Path
) -> None:
    """A group of four is written by both processes, two each. With the same completions both learn as one does."""
    runs, rounds = {}, {}
    settings = {method: {**WRITES, "num_generations": 4, "num_iterations": 2}, "micro_batch_size": 2}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        changes = training(**settings, parallel={"strategy": strategy, "processes": processes})
        leg = inside.told_what_to_write
        runs[processes] = trained(method, f"of-{processes}", changes, 6, leg, str(folder))
        lines = [[json.loads(line) for line in path.open()] for path in sorted(folder.iterdir())]
        assert len(lines) == processes
        rounds[processes] = [
            [pair for row in together for pair in zip(row["prompts"], row["advantages"], strict=True)]
            for together in zip(*lines, strict=True)
        ]
    assert [len(found) for found in rounds[2]] == [4, 4, 4]
    for ours, theirs in zip(rounds[2], rounds[1], strict=True):
        assert [prompt for prompt, _ in ours] == [prompt for prompt, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-5)
        assert sum(value for _, value in ours) == pytest.approx(0, abs=1e-5)
    assert any(abs(sum(value for _, value in found[:2])) > 0.1 for found in rounds[2]), "and not each by itself"
    losses = [[loss for _, loss in legs.losses(run)] for run in (runs[2], runs[1])]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4, abs=1e-5)
    if strategy == "ddp":
        assert alike(weights(runs[2], legs), weights(runs[1], legs))


def rounds_in(folder: Path) -> list[list[str]]:
    """Returns the prompts of each round that `told_what_to_write` has written down, of all processes by rank."""
    lines = [[json.loads(line)["prompts"] for line in path.open()] for path in sorted(folder.iterdir())]
    return [[prompt for prompts in together for prompt in prompts] for together in zip(*lines, strict=True)]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_writes_the_round_under_way_anew(
    before: int, after: int, prepared: Any, legs: Any, inside: Any, tmp_path: Path
) -> None:
    """Rounds of three steps, and a chunk that ends in the middle of the second."""

    def recipe(processes: int) -> Recipe:
        settings = training(grpo={**WRITES, "num_iterations": 3}, micro_batch_size=2, parallel={"processes": processes})
        found: Recipe = prepared("grpo", {**settings, "chunks": {"count": 2}}, 9)
        return found

    run = legs.prepare(recipe(before), "rounds")
    assert run.plan().targets == (5, 9)
    for index, processes in ((1, before), (2, after)):
        legs.adopt(run, recipe(processes))
        (tmp_path / str(index)).mkdir()
        code, printed = legs.leg(inside.told_what_to_write, run.uri, index, str(tmp_path / str(index)))
        assert code == 0, printed
    first, second = rounds_in(tmp_path / "1"), rounds_in(tmp_path / "2")
    assert len(first) == 2
    assert len(second) == 2, "the one under way, and the third"
    assert second[0] == first[1]
    assert second[1] not in first
    restored = legs.final(run).meta.restored
    assert restored.level == "consistent"
    assert restored.checked["method"] == "of other processes"
    assert restored.checked["weights"] == restored.checked["scheduler"] == "match"


def test_an_adapter_in_shards_is_that_of_one_process_and_comes_out_whole(
    trained: Any, legs: Any, tmp_path: Path
) -> None:
    one = trained("sft", "lora", adapter(), 8)
    shards = training(parallel={"strategy": "fsdp", "processes": 2})
    two = trained("sft", "lora-in-shards", {**adapter(), **shards}, 8)
    ours, theirs = ([loss for _, loss in legs.losses(run)] for run in (two, one))
    assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    made = legs.final(two)
    assert not [name for name in made.manifest.files if name.endswith(".safetensors")]
    found = store.merge_model(CheckpointStore(two), made, str(tmp_path / "merged"), "1KB")
    assert found["files"] == ["adapter_model.safetensors"], "one file, as PEFT reads it"
    merged, whole = load_file(tmp_path / "merged" / "adapter_model.safetensors"), weights(one, legs, "adapter_model")
    assert alike(merged, whole)
    assert any(value.abs().sum() > 0 for name, value in merged.items() if "lora_B" in name)
    for stage in (legs.evaluate, legs.export):
        code, printed = legs.leg(stage, two.uri)
        assert code == 0, printed
    assert "logits the same bit for bit" in printed


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_two_processes_learn_what_one_does(
    strategy: str, trained: Any, legs: Any, inside: Any, tmp_path: Path
) -> None:
    one = trained("sft", "plain", {}, 4)
    both = training(compile=True, parallel={"strategy": strategy, "processes": 2})
    (tmp_path / "frames").mkdir()
    two = trained("sft", "compiled", both, 4, inside.compiled, str(tmp_path / "frames"))
    assert all(int((tmp_path / "frames" / rank).read_text()) > 0 for rank in ("0", "1"))
    ours, theirs = ([loss for _, loss in legs.losses(run)] for run in (two, one))
    assert ours == pytest.approx(theirs, rel=2e-4)


@pytest.mark.parametrize("model", [{}, adapter()], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("seconds", "tokens", "says"), [(600.0, 1, "rank 1 hangs in step 1, before or in its writing"), (2.5, 5, "")]
)
def test_a_process_that_stops_writing_hangs_and_one_that_writes_slowly_does_not(
    seconds: float, tokens: int, says: str, model: Changes, prepared: Any, legs: Any, inside: Any
) -> None:
    settings = {**training(grpo=WRITES, parallel={"processes": 2, "hang_after": "6s"}), **model}
    run = legs.prepare(prepared("grpo", settings, 2), "writing")
    code, printed = legs.leg(inside.writing, run.uri, 1, 1, seconds, tokens)
    assert code == bool(says), printed
    assert says in printed
    assert ("rank 0, process" in printed and "in stalling" in printed) == bool(says), "the stack shows where it stands"
