"""Pickles of a checkpoint, looked through for code before anything reads them."""

from __future__ import annotations

import os

from baton.components.shared.checkpoints import sharded

SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
"""Names of files that PyTorch writes as pickles."""


def code_in(folder: str) -> list[str]:
    """Returns a line for each pickle in a folder that would run code when read, or is none.

    Nothing of it is run here: PyTorch lists what a file asks for, against what its safe reader allows.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint
    from transformers.trainer_pt_utils import safe_globals

    problems = []
    for name in sorted(os.listdir(folder)):
        if not name.endswith(SUFFIXES):
            continue
        try:
            with safe_globals():
                unsafe = get_unsafe_globals_in_checkpoint(os.path.join(folder, name))
        except Exception as error:
            unsafe = [f"unreadable, {type(error).__name__}"]
        if unsafe:
            problems.append(f"{name}: a pickle that holds code ({', '.join(unsafe)})")
    return problems + sharded.code_in(folder)


def may_be_pickle(name: str) -> bool:
    """Tells by a file's name in a checkpoint whether it is a pickle, or has some in it."""
    return name.endswith(SUFFIXES) or name.partition("/")[0] in sharded.FOLDERS
