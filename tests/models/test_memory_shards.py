"""The estimate of memory for several processes, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.models import memory
from tests.models.test_memory import LORA, base, items, recipe

EMBEDDING = 400 * 32
BLOCK = 4 * 32 * 32 + 3 * 32 * 96 + 2 * 32
"""Weights of a block: queries, keys, values and what joins the heads; the feed-forward layer; two norms."""
ALL = 2 * EMBEDDING + 3 * BLOCK + 32
"""Embeddings, three blocks, the last norm, and the head."""


def several(strategy: str, processes: int = 4, **parallel: Any) -> dict[str, Any]:
    settings = {"strategy": strategy, "processes": processes, **parallel}
    return {"training": {"micro_batch_size": 2, "parallel": settings}}


def test_shards_of_weights_gradients_and_optimizer() -> None:
    alone, found = items(recipe(training={"micro_batch_size": 2})), items(recipe(**several("fsdp")))
    assert alone["trained weights"] == alone["gradients"] == 4 * ALL
    assert found["trained weights"] == found["gradients"] == 4 * ALL // 4
    tensors = 3 + 3 * 9
    assert found["optimizer"] == (8 * ALL + 4 * tensors) // 4, "two moments, and each tensor's step"
    assert found["activations"] == alone["activations"], "each process has its own rows"
    assert found["logits"] == alone["logits"]
    assert found["gathered weights"] == 4 * (2 * BLOCK + EMBEDDING + BLOCK)
    assert "gathered weights" not in alone


def test_in_sixteen_bits_shards_are_brought_together_so_and_need_no_copies() -> None:
    given = several("fsdp")
    for dtype in ("float32", "bfloat16"):  # of which Accelerate makes float32
        found = items(recipe(training={**given["training"], "precision": "bf16"}, model={"dtype": dtype}))
        assert found["gathered weights"] == 2 * (2 * BLOCK + EMBEDDING + BLOCK)
        assert "16-bit weights" not in found
        assert found["trained weights"] == found["gradients"] == 4 * ALL // 4
        assert found["optimizer"] == (8 * ALL + 4 * 30) // 4


def test_an_adapter_s_base_is_in_shards_too(tmp_path: Path) -> None:
    model = {"base": base(tmp_path, num_key_value_heads=4)}
    found = items(recipe(**several("fsdp", 2), model=model, adapter=LORA))
    adapter = 2 * (4 * 32 + 32 * 4)
    assert found["weights"] == 4 * ALL // 2
    assert found["trained weights"] == found["gradients"] == 4 * 3 * adapter // 2
    assert found["gathered weights"] == 4 * (2 * (BLOCK + adapter) + EMBEDDING + adapter)


def test_a_reference_is_in_shards_too(tmp_path: Path) -> None:
    model = {"base": base(tmp_path, num_key_value_heads=4)}
    given = several("fsdp", 2)
    found = items(recipe(training={**given["training"], "method": "dpo"}, model=model))
    assert found["reference"] == 4 * ALL // 2


def test_deepspeed_computes_with_copies_of_its_masters_which_stage_2_has_whole() -> None:
    in_bf16 = {strategy: several(strategy)["training"] | {"precision": "bf16"} for strategy in ("zero2", "zero3")}
    found = {strategy: items(recipe(training=given)) for strategy, given in in_bf16.items()}
    for kept in found.values():
        assert kept["trained weights"] == kept["gradients"] == 4 * ALL // 4
    assert found["zero2"]["weights computed with"] == 2 * ALL
    assert found["zero3"]["weights computed with"] == 2 * ALL // 4
    assert "gathered weights" not in found["zero2"]
    assert found["zero3"]["gathered weights"] == 2 * (2 * BLOCK + EMBEDDING + BLOCK)


def test_on_the_host_stage_2_leaves_its_weights_on_the_gpu() -> None:
    found = items(recipe(**several("zero2", 2, offload="cpu"), resources={"gpus": 2}))
    assert found["weights computed with"] == 4 * ALL
    assert "optimizer" not in found


def test_ddp_has_all_of_it_and_its_buckets() -> None:
    alone, found = items(recipe(training={"micro_batch_size": 2})), items(recipe(**several("ddp")))
    assert found == {**alone, "gradients on their way": alone["gradients"]}


@pytest.mark.parametrize(
    ("processes", "micro", "copies"),
    [(1, 2, 1), (1, 1, 2), (2, 2, 0), (2, 1, 1), (4, 2, 0), (4, 1, 0)],
)
def test_virtual_workers_hold_a_sum_for_each_level_of_their_tree(processes: int, micro: int, copies: int) -> None:
    alone = items(recipe(training={"micro_batch_size": micro}))
    settings = {"processes": processes, "virtual_workers": 4}
    found = items(recipe(training={"micro_batch_size": micro, "parallel": settings}))
    more = {"sums of virtual workers": copies * alone["gradients"]} if copies else {}
    if processes > 1:
        more["gradients on their way"] = 2 * alone["gradients"]
    assert found == {**alone, **more}


def test_virtual_workers_send_large_gradients_in_few_buckets() -> None:
    large = {"from_scratch": {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2}}
    given = several("ddp", 2, virtual_workers=2)
    found = items(recipe(model={**large, "tokenizer": {"train": {"vocab_size": 400}}}, **given))
    assert found["gradients on their way"] == memory.WORKERS_BUCKETS < found["gradients"]


def test_offloaded_shards_are_not_on_the_gpu() -> None:
    given = several("fsdp", 2, offload="cpu")
    found = items(recipe(**given, resources={"gpus": 2}))
    assert found.keys() == {"activations", "gathered weights", "logits", "fixed"}


@pytest.mark.parametrize(("processes", "rows"), [(1, 1024), (2, 512)])
def test_each_process_writes_its_share_of_a_round(processes: int, rows: int) -> None:
    grpo = {"rewards": ["length"], "num_generations": 2, "max_completion_length": 4096}
    sizes = {"batch_size": 1024, "micro_batch_size": 1, "parallel": {"processes": processes}}
    training = {"method": "grpo", "grpo": grpo, **sizes}
    given = recipe(training=training)
    estimate = memory.estimate(given, memory.build_skeleton(given))
    found = next(item.how for item in estimate.items if item.name == "completions")
    assert found == f"keys and values of {rows} being written, beyond what activations leave"
