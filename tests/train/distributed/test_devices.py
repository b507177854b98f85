"""A process that trains alone sees one GPU, so that `Trainer` does not wrap its model in DataParallel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.train import distributed
from baton.train.distributed import Ranks

VISIBLE = "CUDA_VISIBLE_DEVICES"


def recipe(gpus: int = 1, processes: int = 1) -> Recipe:
    document = {
        "name": "devices",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl"},
        "training": {"parallel": {"processes": processes}},
        "resources": {"gpus": gpus},
    }
    return load.validate(document, origin="devices")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(None, "0", id="unset"),
        pytest.param("3,5", "3", id="numbers"),
        pytest.param("GPU-8f2a,GPU-11c0", "GPU-8f2a", id="names"),
        pytest.param("2", "2", id="one"),
        pytest.param("", "", id="hidden"),
    ],
)
def test_the_first_visible_one_stays(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(before, monkeypatch)
    distributed.pin_device(recipe(), Ranks())
    assert os.environ[VISIBLE] == after


@pytest.mark.parametrize("before", [None, "0,1"])
def test_a_launched_rank_sees_all(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the one of its local rank among them."""
    _set(before, monkeypatch)
    distributed.pin_device(recipe(2, 2), Ranks(1, 2, 1, launched=True))
    assert os.environ.get(VISIBLE) == before


def test_without_gpus_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(None, monkeypatch)
    distributed.pin_device(recipe(gpus=0), Ranks())
    assert VISIBLE not in os.environ


ROWS = """
import os, sys, torch

def visible():
    return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))

# A machine with four GPUs, as far as `TrainingArguments` asks: CUDA counts the visible ones.
torch.cuda.is_available = lambda: True
torch.cuda.device_count = visible
torch.cuda.set_device = lambda *_: None
torch.accelerator.set_device_index = lambda *_: None
sys.modules["bitsandbytes"] = None  # PEFT would import it, and it asks such a torch for CUDA's own functions

if sys.argv[1] == "pinned":
    from baton.recipe import load as recipe_file
    from baton.train import distributed as devices
    from baton.train.distributed import Ranks
    document = {"name": "d", "model": {"base": "b"}, "data": {"source": "r.jsonl"}, "resources": {"gpus": 1}}
    devices.pin_device(recipe_file.validate(document, origin="d"), Ranks())

from transformers import TrainingArguments
arguments = TrainingArguments(sys.argv[2], per_device_train_batch_size=8, report_to="none")
print(arguments.n_gpu, arguments.train_batch_size)
"""


@pytest.mark.parametrize(
    ("kind", "printed"), [pytest.param("pinned", "1 8", id="pinned"), pytest.param("all", "4 32", id="control")]
)
@pytest.mark.slow
def test_a_step_has_the_rows_of_the_recipe(kind: str, printed: str, tmp_path: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (VISIBLE, "LOCAL_RANK")}
    command = [sys.executable, "-c", ROWS, kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


def _set(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "")  # so that it is restored, whatever `pin` makes of it
    if value is None:
        monkeypatch.delenv(VISIBLE)
    else:
        monkeypatch.setenv(VISIBLE, value)
