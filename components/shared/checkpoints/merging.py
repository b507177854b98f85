"""A checkpoint's model in its own folder, for readers that have nothing but Transformers."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from typing import Any

from baton.components.shared.checkpoints import sharded
from baton.components.shared.checkpoints.store import Checkpoint, CheckpointStore
from baton.components.shared.core.errors import DamagedError, UserError

TRAINING = re.compile(r"(^optimizer|^scheduler|^scaler|^rng_state|^baton_state|^trainer_state)")
"""Beginnings of names that only training needs."""
SIZE = re.compile(r"[1-9][0-9]*(KB|MB|GB)")


def merge(store: CheckpointStore, checkpoint: Checkpoint, folder: str, shard_size: str) -> dict[str, Any]:
    """Writes the model of a checkpoint that is in shards to a new folder; a whole one is left where it is.

    Args:
        store: The run's checkpoints.
        checkpoint: One of them.
        folder: Folder to write to, which must not exist or be empty.
        shard_size: Largest file of weights, such as `5GB`.

    Returns:
        `step`, `uri`, `was_sharded`, and, where it was, `folder`, `files` with weights and their `bytes`.

    Raises:
        UserError: the folder holds something, or the size is none.
        DamagedError: the checkpoint is not what was committed.
    """
    summary = {"step": checkpoint.step, "uri": store.uri(checkpoint), "was_sharded": False}
    if f"{sharded.WEIGHTS}/{sharded.METADATA}" not in checkpoint.manifest.files:
        return summary
    if not SIZE.fullmatch(shard_size):
        raise UserError(f"{shard_size!r} is no size of a file; expected one such as 500MB or 5GB.")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UserError(f"{folder!r} exists and is no empty folder.", remedy="Name another one with --output.")
    target = os.path.abspath(folder)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".baton-merge-", dir=os.path.dirname(target)) as scratch:
        names = [name for name in checkpoint.manifest.files if not TRAINING.match(name)]
        local = store.fetch(checkpoint, os.path.join(scratch, "checkpoint"), names=names)
        if not any(os.path.isfile(os.path.join(local, name)) for name in ("config.json", sharded.ADAPTER)):
            raise DamagedError(f"{summary['uri']} has no config.json, without which nobody can load its weights.")
        merged = os.path.join(scratch, "merged")
        files = sharded.merge(local, merged, shard_size=shard_size)
        size = sum(os.path.getsize(os.path.join(merged, name)) for name in files)
        if os.path.isdir(target):
            os.rmdir(target)
        shutil.move(merged, target)
    return summary | {"was_sharded": True, "folder": target, "files": files, "bytes": size}
