"""What a process keeps of ZeRO's state: equal bytes for equal state, and nothing but data in them."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.checkpoint import zero_format
from baton.checkpoint.digest import tree_digest
from baton.checkpoint.sharded import may_be_pickle
from baton.errors import DamagedError, UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def state() -> dict[str, Any]:
    masters = torch.arange(7, dtype=torch.float32) / 3
    return {
        "base_optimizer_state": {
            "state": {0: {"step": torch.tensor(5.0), "exp_avg": masters[:4], "exp_avg_sq": masters[4:] * 0}},
            "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "foreach": None, "fused": True, "params": [0]}],
        },
        "single_partition_of_fp32_groups": [masters, masters.to(torch.bfloat16)],
        "overflow": False,
        "nothing": torch.empty(0),
        "ds_version": "0.19.8",
        "group_paddings": [0, 1],
    }


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    zero_format.write(str(tmp_path / "one"), state())
    found = zero_format.read(str(tmp_path / "one"))
    assert tree_digest(found) == tree_digest(state())
    assert found["base_optimizer_state"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert list(found["base_optimizer_state"]["state"]) == [0], "a number is no name"


def test_equal_state_is_written_as_equal_bytes_and_another_as_others(tmp_path: Path) -> None:
    other = state()
    other["base_optimizer_state"]["state"][0]["exp_avg"] = torch.nextafter(
        other["base_optimizer_state"]["state"][0]["exp_avg"], torch.tensor(9.0)
    )
    for name, each in {"one": state(), "two": state(), "other": other}.items():
        zero_format.write(str(tmp_path / name), each)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes() != (tmp_path / "other").read_bytes()


def test_of_a_slice_only_its_own_numbers_are_written(tmp_path: Path) -> None:
    zero_format.write(str(tmp_path / "one"), {"part": torch.zeros(100_000)[:10]})
    assert (tmp_path / "one").stat().st_size < 1000


class Stage(IntEnum):
    GRADIENTS = 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(Stage.GRADIENTS, "a Stage in ZeRO's state", id="enum"),
        pytest.param(object(), "a object in ZeRO's state", id="object"),
        pytest.param({Stage.GRADIENTS: 1}, "keys in ZeRO's state", id="key"),
        pytest.param(tree_digest, "a function in ZeRO's state", id="function"),
    ],
)
def test_an_object_is_refused_before_anything_is_written(tmp_path: Path, value: object, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        zero_format.write(str(tmp_path / "one"), {"kept": OrderedDict(value=value)})
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(None, id="no-header"),
        pytest.param("{", id="no-json"),
        pytest.param('{"dict": [["a", {"tensor": "9"}]]}', id="no-such-tensor"),
        pytest.param('{"dict": [["a", {"object": "os.system"}]]}', id="another-kind"),
        pytest.param('{"dict": [["a", {"tensor": "0", "dict": []}]]}', id="two-kinds"),
        pytest.param('{"dict": [["a", ["b"]]]}', id="bare-list"),
        pytest.param('{"list": []}', id="no-state"),
    ],
)
def test_what_was_written_otherwise_is_damaged(tmp_path: Path, header: str | None) -> None:
    path = str(tmp_path / "optimizer_0.zero")
    save_file({"0": torch.zeros(1)}, path, metadata={"state": header} if header else None)
    with pytest.raises(DamagedError, match=r"optimizer_0"):
        zero_format.read(path)


def test_a_pickle_is_no_state(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "optimizer_0.zero")
    with pytest.raises(DamagedError, match="cannot be read"):
        zero_format.read(str(tmp_path / "optimizer_0.zero"))
    assert not may_be_pickle(zero_format.file_name(0))


def recipe(*overrides: str) -> Recipe:
    document = {"name": "zero", "model": {"base": "org/model"}, "data": {"source": "rows.jsonl"}}
    found = load.validate({**document, "training": {"batch_size": 8}}, origin="zero")
    return load.with_overrides(found, overrides)


ZERO2 = "training.parallel={strategy: zero2, processes: 2}"
ZERO3 = "training.parallel={strategy: zero3, processes: 2}"


@pytest.mark.skipif(HAS_DEEPSPEED, reason="deepspeed is installed")
def test_where_the_package_is_missing_its_name_is_told() -> None:
    with pytest.raises(UserError, match="zero3 needs the package deepspeed") as caught:
        zero_format.require_package(recipe(ZERO3))
    assert "pip install deepspeed==" in str(caught.value.remedy)


@pytest.mark.skipif(HAS_DEEPSPEED, reason="deepspeed is installed")
@pytest.mark.parametrize(
    ("overrides", "asks"),
    [
        pytest.param([], False, id="plain"),
        pytest.param(["training.parallel={strategy: zero3, processes: 1}"], False, id="one process"),
        pytest.param(["training.parallel={strategy: fsdp, processes: 2}"], False, id="fsdp"),
        pytest.param([ZERO2], True, id="zero2"),
    ],
)
def test_the_package_is_asked_for_where_it_is_used(overrides: list[str], asks: bool) -> None:
    with pytest.raises(UserError) if asks else contextlib.nullcontext():
        zero_format.require_package(recipe(*overrides))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        pytest.param(["training.parallel=deepspeed"], "stages are zero2 and zero3", id="name"),
        pytest.param([ZERO2, "training.method=dpo"], "dpo was not tried with zero2", id="method"),
        pytest.param([ZERO3, "training.precision=fp16", "resources.gpus=2"], "use bf16", id="fp16"),
        pytest.param([ZERO3, "model.dtype=bfloat16"], "model.dtype: bfloat16 goes with zero3 where", id="dtype"),
        pytest.param([ZERO2, "training.optimizer=adafactor"], "adafactor needs each weight's shape", id="optimizer"),
        pytest.param([ZERO2, "training.compile=true"], "training.compile: does not go with .* zero2", id="compile"),
        pytest.param([ZERO2, "training.parallel.offload=cpu"], "already", id="offload"),
    ],
)
def test_what_was_not_tried_with_it_is_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        recipe(*overrides)


def test_an_adapter_goes_with_it() -> None:
    assert recipe(ZERO3, "adapter={type: lora}").parallel.zero_stage == 3
