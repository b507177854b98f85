"""File format for each process's state under DeepSpeed's ZeRO, and the package that ZeRO needs.

    optimizer_0.zero    the first process's part of masters and optimizer: safetensors, the rest in its header
    optimizer_1.zero    the second one's

DeepSpeed itself writes pickles of its own classes, which run code when read, the weights a second time, and a script.
These files can hold only tensors, numbers, names and containers.
"""

from __future__ import annotations

import importlib.util
import json
import os
from typing import TYPE_CHECKING, Any

from baton.documents import load
from baton.errors import DamagedError, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from baton.recipe.recipe import Recipe

PACKAGE = "deepspeed"
VERSION = "0.19.8"  # the tested release; older ones keep another state
_HEADER = "state"  # the only entry: safetensors writes several in no fixed order


def require_package(recipe: Recipe) -> None:
    """Raises `UserError` if a recipe needs DeepSpeed and it is not installed."""
    if recipe.world_size > 1 and recipe.parallel.is_zero and importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"training.parallel.strategy {recipe.parallel.strategy} needs the package {PACKAGE}, which is not "
            "installed.",
            remedy=f"Run `pip install {PACKAGE}=={VERSION}`, add it to the image, or set strategy: fsdp.",
        )


def file_name(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"optimizer_{rank}.zero"


def write(path: str, state: dict[str, object]) -> None:
    """Writes containers of tensors and plain values, equal states as equal bytes; `TypeError` for anything else."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    header = json.dumps(_encoded(state, tensors))
    save_file(tensors, path, metadata={_HEADER: header})


def read(path: str, *, lazily: bool = False) -> dict[str, Any]:
    """Reads a file of `write`, else `DamagedError`; `lazily` with slices of the file for tensors with dimensions."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = load((file.metadata() or {})[_HEADER])
            tensors = {}
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                tensors[name] = part if lazily and part.get_shape() else file.get_tensor(name)
            state = _decoded(header, tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{os.path.basename(path)} cannot be read as a process's state: {error}.") from None
    if not isinstance(state, dict):
        raise DamagedError(f"{os.path.basename(path)} holds no process's state.")
    return state


def _encoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns a value as JSON, and moves its tensors to `tensors`, by name."""
    from torch import Tensor

    if isinstance(value, Tensor):
        # Named in order of visit: equal states get equal names, and files of equal bytes.
        name = f"{len(tensors):06d}"
        # Cloned if it is a view: its whole storage would be written along with it.
        copied = value.detach().cpu().contiguous()
        tensors[name] = copied if copied.untyped_storage().nbytes() == copied.nbytes else copied.clone()
        return {"tensor": name}
    if isinstance(value, dict):
        if not all(type(key) in (int, str) for key in value):
            raise TypeError(f"keys in ZeRO's state are names or numbers, not {sorted(map(repr, value))}")
        # Pairs: a JSON object would turn number keys into text.
        return {"dict": [[key, _encoded(each, tensors)] for key, each in value.items()]}
    # Exact types: an instance of a subclass would come back as something else.
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(each, tensors) for each in value]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__} in ZeRO's state is not kept in a checkpoint; its plain values are")


def _decoded(value: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list where a value is expected")
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decoded(each, tensors) for key, each in content}
    if kind in ("list", "tuple"):
        members = [_decoded(each, tensors) for each in content]
        return members if kind == "list" else tuple(members)
    raise ValueError(f"{kind!r} is not a kind of value")
