"""The user's tasks for the LM evaluation harness: YAML files, which may call functions that lie beside them."""

from __future__ import annotations

import os

from baton.components.shared.core.errors import UserError
from baton.components.shared.store.storage import Storage

SETTING = "evaluation.tasks.include_path"
ENDINGS = (".yaml", ".yml", ".py")
"""Files of tasks that run: a YAML file names functions, and its templates can call some."""


def fetch(include_path: str, scratch: str) -> str:
    """Returns a local folder with the user's tasks.

    Args:
        include_path: As in the recipe.
        scratch: Folder for tasks that come from a store.

    Raises:
        UserError: there is none.
    """
    folder = include_path
    if "://" in include_path:
        storage, folder = Storage(include_path), os.path.join(scratch, "tasks")
        os.makedirs(folder, exist_ok=True)
        for name in storage.find(""):
            storage.download(name, os.path.join(folder, name))
    names = [name for _, _, files in os.walk(folder) for name in files]
    if not any(name.endswith((".yaml", ".yml")) for name in names):
        raise UserError(
            f"{SETTING} {include_path!r} holds no task.", remedy="Give a folder with the YAML files of your tasks."
        )
    return os.path.abspath(folder)
