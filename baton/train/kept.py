"""Models that a process keeps as they were loaded, for trials that train from them in turns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Loader = Callable[[], "PreTrainedModel"]


class KeptModels:
    """Copies of models that were loaded once; each is what loading it again would give, random state included.

    Weights that a trial does not train are not copied. One that writes to them all the same, in place, is noticed at
    the next copy, which is loaded again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[PreTrainedModel, list[int], dict[str, Any]]] = {}

    def copy(self, key: tuple[Any, ...], load: Loader, *, device: str, shares: bool) -> PreTrainedModel:
        """Returns a model of its own for a trial.

        Args:
            key: Everything that the loaded model depends on, its role first; one is kept for a role.
            load: Loads it, and leaves the random state that training goes on from.
            device: Place of the weights that are kept.
            shares: Whether the trial leaves the weights as they are, as an adapter does.
        """
        from baton.models import rng

        kept = self._kept.get(key)
        if kept is None or [value._version for value in kept[0].parameters()] != kept[1]:
            for other in [other for other in self._kept if other[0] == key[0]]:
                del self._kept[other]
            model = load().to(device)
            self._kept[key] = kept = model, [value._version for value in model.parameters()], rng.capture()
        model, _, drawn = kept
        rng.restore(drawn)
        return copy.deepcopy(model, {id(value): _same(value) for value in model.parameters()} if shares else {})


def _same(value: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns another parameter with the same memory, whose writes count as the kept one's."""
    return type(value)(value.detach(), requires_grad=value.requires_grad)
