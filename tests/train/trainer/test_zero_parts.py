"""What Baton does beside DeepSpeed's engine: its settings, the zeros after a weight's last value, and buffers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.train import sharding


def recipe(*overrides: str) -> Recipe:
    document = {"name": "zero", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}}
    found = load.validate({**document, "training": {"batch_size": 8}}, origin="zero")
    return load.with_overrides(found, overrides)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What passes for an installed DeepSpeed: its table of what it would compile."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    ops = tmp_path / "deepspeed" / "ops"
    ops.mkdir(parents=True)
    (ops.parent / "__init__.py").touch()
    (ops / "__init__.py").write_text("__compatible_ops__ = {'deepspeed_shm_comm': True, 'other': True}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "none")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


REST = {
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": "auto"},
    **dict.fromkeys(
        (
            "gradient_clipping",
            "gradient_accumulation_steps",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
        ),
        "auto",
    ),
}
BUCKET = {"reduce_bucket_size": 50_000_000}
WHOLE = {"stage3_gather_16bit_weights_on_model_save": True}


@pytest.mark.usefixtures("package")
def test_settings_on_cpus_keep_it_from_compiling() -> None:
    found = sharding.deepspeed_arguments(recipe("training.parallel={strategy: zero2, processes: 2}"))
    assert found == {"deepspeed": {"zero_optimization": {"stage": 2, **BUCKET}, **REST}}
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert sys.modules["deepspeed.ops"].__compatible_ops__ == {"deepspeed_shm_comm": False, "other": True}
    found = sharding.deepspeed_arguments(recipe("training.parallel={strategy: zero3, processes: 2}"))
    assert found["deepspeed"]["zero_optimization"] == {"stage": 3, **BUCKET, **WHOLE}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("stage", [2, 3])
def test_settings_on_gpus(stage: int) -> None:
    parallel = f"training.parallel={{strategy: zero{stage}, offload: cpu}}"
    found = sharding.deepspeed_arguments(recipe(parallel, "resources.gpus=2"))
    host = {"device": "cpu", "pin_memory": True}
    expected = {"stage": stage, **BUCKET, "offload_optimizer": host}
    assert found["deepspeed"]["zero_optimization"] == (
        {**expected, **WHOLE, "offload_param": host} if stage == 3 else expected
    )
    assert os.environ["DS_ACCELERATOR"] == "none"
    assert "deepspeed.ops" not in sys.modules


@pytest.mark.usefixtures("package")
def test_each_strategy_has_its_arguments() -> None:
    uncompiled = {"torch_compile": False, "torch_compile_mode": None}
    assert sharding.sharding_arguments(recipe("training.parallel={processes: 2}")) == uncompiled
    sharded = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "cpu_offload": False}
    found = sharding.sharding_arguments(recipe("training.parallel={strategy: fsdp, processes: 2}"))
    assert found == {"fsdp": True, "fsdp_config": sharded, **uncompiled}
    found = sharding.sharding_arguments(recipe("training.parallel={strategy: fsdp, offload: cpu}", "resources.gpus=2"))
    assert found["fsdp_config"] == {**sharded, "cpu_offload": True}
    found = sharding.sharding_arguments(recipe("training.parallel={strategy: zero2, processes: 2}"))
    assert set(found) == {"deepspeed", *uncompiled}
    assert found["torch_compile"] is False


class Weight(SimpleNamespace):
    """A weight of which a process has a part."""

    ds_tensor: torch.Tensor
    ds_numel: int


@pytest.mark.parametrize(
    ("rank", "cleared", "masters"),
    [
        (0, [[7, 7, 7], [7, 7], [7]], [7] * 6),
        (1, [[7, 7, 0], [7, 7], [0]], [7, 7, 0, 7, 7, 0]),
        (2, [[0, 0, 0], [0, 0], [0]], [0] * 6),
    ],
)
def test_what_stands_after_a_weights_last_value_becomes_zero(
    rank: int, cleared: list[list[float]], masters: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of five, four and one values, in parts of three, two and one."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    sizes = [(5, 3), (4, 2), (1, 1)]
    group = [Weight(ds_tensor=torch.full((part,), 7.0), ds_numel=whole) for whole, part in sizes]
    optimizer = SimpleNamespace(fp16_groups=[group], fp32_partitioned_groups_flat=[torch.full((6,), 7.0)])
    sharding._clear_padding(optimizer)
    assert [weight.ds_tensor.tolist() for weight in group] == cleared
    assert optimizer.fp32_partitioned_groups_flat[0].tolist() == masters


def test_buffers_are_restored_from_the_models_own_files(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(2)
    weights = model.weight.detach().clone()
    saved = {"running_mean": torch.tensor([1.0, 2.0]), "weight": torch.tensor([5.0, 6.0])}
    save_file(saved, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"running_var": torch.tensor([3.0, 4.0])}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"num_batches_tracked": torch.tensor(9)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "model.json").write_text("{}")
    sharding._load_buffers(model, str(tmp_path))
    assert model.running_mean is not None
    assert model.running_var is not None
    assert model.running_mean.tolist() == [1.0, 2.0]
    assert model.running_var.tolist() == [3.0, 4.0]
    assert model.num_batches_tracked == 0
    assert torch.equal(model.weight, weights), "those come with their masters"
