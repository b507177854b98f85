"""Models and files that a process keeps, for trials that train from them in turns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.store.cache import NodeCache

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Loaded:
    key: Hashable
    seed: int
    model: PreTrainedModel
    versions: list[int]  # of its weights, counted by torch at each write in place
    drawn: dict[str, Any] | None  # random state that loading left, None where it draws nothing after the seed

    def is_of(self, key: Hashable, seed: int) -> bool:
        # Counts tell of a trial that wrote to weights which it shares, as an unknown kind of adapter may.
        return self.key == key and self.versions == _versions(self.model) and (not self.drawn or self.seed == seed)


class Kept:
    """Models that were loaded once, and a cache of tokens and checkpoints for stores that are not a folder."""

    def __init__(self, cache: NodeCache | None = None) -> None:
        self.cache = cache
        self._kept: dict[str, _Loaded] = {}

    def copy(
        self,
        role: str,
        key: Hashable,
        load: Callable[[], PreTrainedModel],
        *,
        seed: int,
        shares: bool,
    ) -> PreTrainedModel:
        """Returns a model for one trial, as if loaded again, random state included.

        Args:
            role: Only the newest model of a role is kept.
            key: Value that is equal where `load` gives the same model.
            load: Seeds the process and loads the model.
            seed: Seed that `load` begins with.
            shares: Whether the copy has the kept weights themselves, for a trial that does not train them.
        """
        from transformers import set_seed

        from baton.models import rng

        kept = self._kept.get(role)
        if kept is None or not kept.is_of(key, seed):
            self._kept.pop(role, None)  # first: two may not fit in memory
            kept = self._kept[role] = _load(key, load, seed)
        if kept.drawn:
            rng.restore(kept.drawn)
        else:
            set_seed(seed)
        same = {id(value): _same(value) for value in kept.model.parameters()} if shares else {}
        return copy.deepcopy(kept.model, same)


def _load(key: Hashable, load: Callable[[], PreTrainedModel], seed: int) -> _Loaded:
    from transformers import set_seed

    from baton.checkpoint.digest import tree_digest
    from baton.models import rng

    model = load()
    drawn = rng.capture()
    set_seed(seed)
    draws = tree_digest(rng.capture()) != tree_digest(drawn)
    return _Loaded(key, seed, model, _versions(model), drawn if draws else None)


def _versions(model: PreTrainedModel) -> list[int]:
    return [value._version for value in model.parameters()]


def _same(value: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns another parameter with the same memory; a write to it counts as one to the first."""
    return type(value)(value.detach(), requires_grad=value.requires_grad)
