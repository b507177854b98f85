"""Models kept between trials, and a process put back between their turns."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import GradientState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from baton.checkpoint.digest import tree_digest
from baton.models import rng
from baton.train.kept import Kept
from baton.train.turns import fresh


class Loader:
    """Builds a model from the generator that its seed sets, or from one that it leaves alone."""

    def __init__(self, *, draws: bool, seed: int = 1) -> None:
        self.draws, self.seed, self.loads = draws, seed, 0

    def __call__(self) -> LlamaForCausalLM:
        self.loads += 1
        shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = LlamaConfig(vocab_size=16, tie_word_embeddings=True, **shape)
        set_seed(self.seed)
        if self.draws:
            return LlamaForCausalLM(config)
        with rng.undisturbed():
            torch.manual_seed(0)
            return LlamaForCausalLM(config)


def copied(kept: Kept, load: Loader, *, shares: bool = False, key: object = "same") -> LlamaForCausalLM:
    return kept.copy("base", key, load, seed=load.seed, shares=shares)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("draws", [True, False])
def test_a_copy_is_what_loading_again_gives(draws: bool, shares: bool) -> None:
    load, kept = Loader(draws=draws), Kept()
    again = Loader(draws=draws)
    for _ in range(2):
        rng.seed(99)
        model = copied(kept, load, shares=shares)
        state = tree_digest(rng.capture())
        wanted = again()
        assert tree_digest(model.state_dict()) == tree_digest(wanted.state_dict())
        assert state == tree_digest(rng.capture())
        assert model.lm_head.weight is model.model.embed_tokens.weight  # tied
    assert (load.loads, again.loads) == (1, 2)


def test_only_an_adapters_trial_has_the_kept_weights_themselves() -> None:
    load, kept = Loader(draws=False), Kept()
    own, first, second = (copied(kept, load, shares=shares) for shares in (False, True, True))
    places = [model.lm_head.weight.data_ptr() for model in (own, first, second)]
    assert places[0] != places[1] == places[2]
    assert first.lm_head.weight is not second.lm_head.weight
    assert first.model.layers[0] is not second.model.layers[0]  # adapters are put into these


@pytest.mark.parametrize(
    ("shares", "write", "loads"),
    [
        (True, lambda weight: weight.add_(1.0), 2),
        (True, lambda weight: torch._foreach_add_([weight], 1.0), 2),
        (True, lambda weight: weight.copy_(weight * 2), 2),
        (True, lambda weight: setattr(weight, "data", weight.data * 2), 1),  # another tensor
        (False, lambda weight: weight.add_(1.0), 1),
    ],
    ids=["in place", "fused", "copied over", "replaced", "its own"],
)
def test_a_trial_that_writes_to_shared_weights_leaves_no_trace(
    shares: bool, write: Callable[[Any], Any], loads: int
) -> None:
    load, kept = Loader(draws=False), Kept()
    with torch.no_grad():
        write(copied(kept, load, shares=shares).lm_head.weight)
    assert tree_digest(copied(kept, load).state_dict()) == tree_digest(Loader(draws=False)().state_dict())
    assert load.loads == loads


@pytest.mark.parametrize(
    ("draws", "seed", "key", "loads"),
    [(False, 2, "same", 1), (True, 2, "same", 2), (True, 1, "same", 1), (False, 1, "other", 2)],
)
def test_another_seed_loads_again_only_where_loading_draws(draws: bool, seed: int, key: str, loads: int) -> None:
    load, kept = Loader(draws=draws), Kept()
    copied(kept, load)
    load.seed = seed
    model = copied(kept, load, key=key)
    state, wanted = tree_digest(rng.capture()), Loader(draws=draws, seed=seed)()
    assert tree_digest(model.state_dict()) == tree_digest(wanted.state_dict())
    assert state == tree_digest(rng.capture())
    assert load.loads == loads


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "python": (random.random, random.getstate),
    "numpy": (np.random.rand, lambda: tree_digest(np.random.get_state()[1])),
    "torch": (lambda: torch.rand(1), lambda: tree_digest(torch.random.get_rng_state())),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "variable": (lambda: os.environ.update(BATON_TODAY="2026-01-01"), lambda: os.environ.get("BATON_TODAY")),
    "devices": (PartialState, lambda: dict(PartialState._shared_state)),
    "gradients": (GradientState, lambda: dict(GradientState._shared_state)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_turn_leaves_nothing_in_its_process(name: str) -> None:
    change, look = CHANGES[name]
    PartialState._reset_state()
    GradientState._reset_state()
    before = look()
    with contextlib.suppress(KeyError), fresh():
        change()
        changed = look()
        raise KeyError
    assert changed != before == look()
