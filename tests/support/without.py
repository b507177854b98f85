"""Negative controls: a copy of a checkpoint without parts of the state, from which a chunk must end on other bits."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.checkpoint import sharded
from baton.train import inputs


def install() -> None:
    """Has chunks of this process leave out any part of the state; by itself Baton does so with two."""
    inputs.CONTROLS.update(CONTROLS)


def _weights(folder: str) -> None:
    """Halves them."""
    from safetensors.torch import load_file, save_file

    if sharded.is_sharded(folder):
        _change_shards(os.path.join(folder, sharded.WEIGHTS), 0.5)
    for path in Path(folder).glob("*.safetensors"):
        if not path.name.startswith("baton_state"):
            halved = {
                name: value / 2 if value.is_floating_point() else value for name, value in load_file(path).items()
            }
            save_file(halved, path, metadata={"format": "pt"})


def _optimizer(folder: str) -> None:
    """Takes out what an optimizer that has made no step does not have: its sums, and a scheduled rate."""
    if sharded.is_sharded(folder):
        _change_shards(os.path.join(folder, sharded.OPTIMIZER), 0.0)
    else:

        def begun(saved: dict[str, Any]) -> dict[str, Any]:
            groups = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in saved["param_groups"]]
            return {**saved, "state": {}, "param_groups": groups}

        _change(folder, "optimizer.pt", begun)


def _scheduler(folder: str) -> None:
    """Resets the counts of torch's schedulers, of its plateau's and of Transformers' GreedyLR.

    GreedyLR's rate stays: it is the optimizer's too, and the chunk's proof would find that the two differ.
    """
    begin = {"last_epoch": 0, "_step_count": 1, "num_bad_epochs": 0, "num_good_epochs": 0}

    def reset(saved: dict[str, Any]) -> dict[str, Any]:
        begun = {name: value for name, value in begin.items() if name in saved}
        if "best" in saved:
            begun["best"] = math.inf if saved["mode"] == "min" else -math.inf
        return {**saved, **begun}

    _change(folder, "scheduler.pt", reset)


def _position(folder: str) -> None:
    """Without the log's running sums it leaves averages that have no steps to be over."""
    _change_log(folder, global_step=0, epoch=0)


def _log(folder: str) -> None:
    step = json.loads(Path(folder, "trainer_state.json").read_text())["global_step"]
    _change_log(folder, log_history=[], num_input_tokens_seen=0)
    sums = {"globalstep_last_logged": step, "metrics": {}, "total_train_tokens": 0}
    _change_extra(folder, "log_window", lambda window: {**sums, "tr_loss": window["tr_loss"] * 0})


def _cleared(value: Any) -> Any:
    """Returns a kept value as it was before anything was kept: numbers 0, lists empty; weights are halved."""
    if isinstance(value, dict):
        return {name: _cleared(each) for name, each in value.items()}
    if hasattr(value, "is_floating_point"):
        return value / 2 if value.is_floating_point() else value * 0
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(0)
    return type(value)() if isinstance(value, tuple | list) else value


def _change_shards(folder: str, factor: float) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = sharded.read_metadata(folder).state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else 0
        for name, entry in entries.items()
    }
    sharded.fill(folder, state)
    changed = {name: value * factor if hasattr(value, "shape") else value for name, value in state.items()}
    shutil.rmtree(folder)
    dcp.save(changed, checkpoint_id=folder, no_dist=True)


def _change_log(folder: str, **values: Any) -> None:
    path = Path(folder, "trainer_state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _change_extra(folder: str, name: str, change: Callable[[Any], Any]) -> None:
    """Changes what Baton saves of each rank."""
    for path in Path(folder).glob("baton_state*.pt"):
        _change(folder, path.name, lambda saved: {**saved, name: change(saved[name])})


def _change(folder: str, file: str, change: Callable[[Any], Any]) -> None:
    import torch

    path = os.path.join(folder, file)
    torch.save(change(torch.load(path, weights_only=True)), path)


CONTROLS: dict[str, Callable[[str], None]] = {
    "weights": _weights,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "scaler": lambda folder: Path(folder, "scaler.pt").unlink(missing_ok=True),
    "position": _position,
    "callbacks": lambda folder: _change_extra(folder, "callbacks", _cleared),
    "log": _log,
    "method": lambda folder: _change_extra(
        folder, "method", lambda saved: _cleared(saved) | ({"completions": None} if "completions" in saved else {})
    ),
}
"""Part of the state → takes it out of a checkpoint's files."""
