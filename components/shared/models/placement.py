"""Where a model lies that is asked and not trained: on the CPU, on one GPU, or spread over all that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from baton.components.shared.core.errors import UserError

if TYPE_CHECKING:
    from torch import nn

ROOM = 0.8
"""Share of a GPU's free memory that weights may fill; activations and the keys of completions need the rest."""


def place(model: Any) -> Any:
    """Puts a model on the first GPU, on as many as it needs where that is too small, or on the CPU without one.

    Raises:
        UserError: all of them together have no room for it.
    """
    import torch

    if getattr(model, "is_quantized", False):  # weights in few bits are on the accelerator already
        return model
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    spread = spread_over(model, {number: torch.cuda.mem_get_info(number)[0] for number in range(count)})
    if spread is None:
        return model.to("cuda" if count else "cpu")
    from accelerate import dispatch_model

    return dispatch_model(model, spread)


def take_back(model: Any) -> None:
    """Puts a model that `place` has placed on the CPU again, so that another has the room."""
    from accelerate.hooks import remove_hook_from_submodules
    from torch import nn

    remove_hook_from_submodules(model)
    nn.Module.to(model, "cpu")  # that of a model that was spread is refused


def spread_over(model: nn.Module, free: Mapping[int, int]) -> dict[str, int] | None:
    """Returns the device of each part of a model, a block never cut; None where one has room for all of it.

    Args:
        model: The model.
        free: Device → bytes that are free.

    Raises:
        UserError: all of them together have no room for it.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes

    room = {device: int(ROOM * size) for device, size in free.items()}
    size = compute_module_sizes(model)[""]
    if len(room) < 2 or size <= room[min(room)]:
        return None
    whole = list(getattr(model, "_no_split_modules", None) or [])
    # What has no room goes to the host's disk, where a model would answer for days.
    spread: dict[str, int] = infer_auto_device_map(model, dict([*room.items(), ("cpu", 0)]), whole)
    if not set(spread.values()) <= set(room):
        raise UserError(
            f"the model's weights are {size / 1e9:.1f} GB, and {len(room)} GPUs have {sum(room.values()) / 1e9:.1f} GB "
            "for them.",
            remedy="Raise resources.gpus, or hold the model in fewer bits: model.dtype.",
        )
    return spread
