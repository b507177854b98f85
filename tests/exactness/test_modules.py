"""Packages that a chunk has not loaded after its first step, in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness.matrix import Cell

CHUNK = """
import json, sys
from baton.train import lazy_imports as deferring; from baton import events

def hear(event):
    if isinstance(event, events.Step):
        print("loaded", json.dumps([name for name in sys.modules if not deferring.is_waiting(name)]), flush=True)

events.hear(hear)
from baton.train.chunk import run_chunk
run_chunk(sys.argv[1], int(sys.argv[2]))
"""
COMPILER = {"torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy", "triton"}
SHARDED = {"torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"}
OTHERS = {"wandb", "scipy", "sklearn", "boto3", "botocore", "mlflow", "matplotlib", "deepspeed", "bitsandbytes"}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "plain": ("scratch", {}, COMPILER | SHARDED | OTHERS | {"peft"}),
    "recomputed": (
        "scratch",
        {"training__micro_batch_size": 1, "training__gradient_checkpointing": True},
        COMPILER | SHARDED | OTHERS | {"peft"},
    ),
    "LoRA": ("lora", {}, COMPILER | SHARDED | OTHERS),
    "compiled": ("scratch", {"training__compile": True}, OTHERS | {"peft"}),
}


@pytest.mark.parametrize(
    "name", [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGURATIONS]
)
def test_a_chunk_has_not_loaded(recipes: dict[str, Recipe], legs: Any, name: str) -> None:
    base, changes, absent = CONFIGURATIONS[name]
    run = legs.prepare(legs.changed(recipes[base], chunks__count=2, **changes), f"modules-{name.lower()}")
    assert not absent & _loaded(run), "packages that a chunk need not load"
    assert not absent & _loaded(run, chunk=2), "packages that a resumed chunk need not load"


@pytest.mark.parametrize("method", ["dpo", "kto", "reward", "grpo"])
@pytest.mark.slow
def test_a_chunk_of_another_method_has_not_loaded(grid: Any, legs: Any, method: str) -> None:
    run = legs.prepare(grid(Cell(method, "full", "plain")), f"modules-{method}")
    found = (COMPILER | SHARDED | OTHERS) & _loaded(run)
    assert not found, "packages that a chunk need not load"


def test_what_is_handed_out_in_the_place_of_a_class_or_function_is_one() -> None:
    ran = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    handed = set(ran.stdout.split())
    assert {"DTensor", "OptimizedModule", "PeftModel", "Shard", "linear_sum_assignment"} <= handed


NAMES = """
import abc, gc, inspect
from baton.train import lazy_imports as deferring
from baton.train import imports as lean, methods
deferring.defer({**lean.DEFERRED, **lean.UNTRACED})
for method in ("sft", "dpo", "grpo", "kto", "reward"):
    methods.load(method)
import wandb
from torch._dynamo.eval_frame import OptimizedModule  # asked for in training
assert deferring.is_waiting("wandb") and deferring.is_waiting("torch._dynamo")
names = [each for each in gc.get_objects() if type(each) is deferring.LazyName]
import torch, typing_extensions
# The last two take besides what stands for an object while the compiler traces, and what a protocol describes.
by_type = (type, abc.ABCMeta, torch._C._TensorMeta, torch._opaque_base.OpaqueBaseMeta, typing_extensions._ProtocolMeta)
for each in names:
    known = each.resolved()
    assert inspect.isclass(known) or inspect.isroutine(known), each._name
    if inspect.isclass(known):
        # `isinstance` of a deferred class asks for its name alone.
        assert known.__name__ == each._name and type(known) in by_type, each._name
        assert not getattr(known, "_is_protocol", False), each._name
    print(each._name)
import torch._dynamo
assert torch._dynamo.config and not deferring.is_waiting("torch._dynamo"), "the compiler is loaded"
settings = vars(lean.UNTRACED["torch._dynamo"])["values"]
assert settings["error_on_nested_fx_trace"] is torch._dynamo.config.error_on_nested_fx_trace
assert wandb.login and not deferring.is_waiting("wandb") and wandb.run is lean.DEFERRED["wandb"].values["run"]
"""


def _loaded(run: Run, *, chunk: int = 1) -> set[str]:
    ran = subprocess.run([sys.executable, "-c", CHUNK, run.uri, str(chunk)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told = next(line for line in ran.stdout.splitlines() if line.startswith("loaded "))
    return set(json.loads(told.removeprefix("loaded ")))
