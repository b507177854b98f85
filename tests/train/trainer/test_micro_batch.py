"""`micro_batch_size: auto`: who may ask for it, and which size is taken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.model import Model
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train import build
from baton.train.tokens import ChunkTokens
from tests.train.chunks import first_chunk


def recipe(**training: Any) -> Recipe:
    """A recipe that leaves the size to memory."""
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl"},
        "training": {"batch_size": 24, "micro_batch_size": "auto", **training},
    }
    return load.validate(document, origin="tiny")


@pytest.mark.parametrize(("room", "size"), [(99, 24), (24, 24), (23, 12), (11, 8), (7, 6), (5, 4), (3, 3), (1, 1)])
def test_the_largest_divisor_that_fits(room: int, size: int) -> None:
    tried: list[int] = []

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= room

    assert build.largest_micro_batch(recipe(), fits) == size
    assert tried == [n for n in (24, 12, 8, 6, 4, 3, 2, 1) if n >= size]


def test_nothing_fits() -> None:
    with pytest.raises(UserError, match=r"not one row of data\.max_length 512 fits memory\. Set training\.gradient_ch"):
        build.largest_micro_batch(recipe(), lambda n: False)


def test_the_number_takes_auto_s_place() -> None:
    given = build.with_micro_batch(recipe(), 8)
    assert (given.micro_batch_size_per_process, given.gradient_accumulation_steps, given.split) == (8, 3, "3 x 8")


def test_auto_is_not_used_as_a_number() -> None:
    auto = recipe()
    for use in (lambda: auto.micro_batch_size_per_process, lambda: auto.gradient_accumulation_steps):
        with pytest.raises(UserError, match="is auto, and the first chunk has not found it yet"):
            use()
    assert auto.split == "split as memory allows"


METHODS: dict[str, dict[str, Any]] = {
    "kto": {},
    "grpo": {"grpo": {"rewards": ["length"]}},
    "rloo": {"rloo": {"rewards": ["length"]}},
}


@pytest.mark.parametrize("method", METHODS)
def test_auto_is_refused_where_the_loss_depends_on_it(method: str) -> None:
    with pytest.raises(UserError, match=f"training: micro_batch_size: the loss of {method} depends on it.*give a num"):
        recipe(method=method, **METHODS[method])


def test_another_word_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        recipe(micro_batch_size="large")
    assert "training.micro_batch_size: Input should be 'auto' (got 'large')" in str(caught.value)


class Raced(Storage):
    """A store in which another process commits the micro-batch size in the moment before this one does."""

    def create(self, path: str, data: bytes) -> bool:
        if path.endswith("micro_batch.json"):
            first = {"micro_batch_size": 2, "found_by": "trial", "device": "another"}
            assert super().create(path, json.dumps(first).encode())
        return super().create(path, data)


@pytest.mark.parametrize(("kind", "size"), [(Storage, 24), (Raced, 2)])
def test_the_process_that_is_first_decides(
    kind: type[Storage], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(kind(str(tmp_path)), "raced")
    scratch = {
        "from_scratch": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "tokenizer": {"train": {"vocab_size": 300}},
    }
    run.create(recipe().model_copy(update={"model": Model.model_validate(scratch)}))
    context = first_chunk(run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tokens = ChunkTokens(run, context.recipe, context.plan, lambda _: str(tmp_path))
    resolved = build.resolve_micro_batch(context, tokens, {}, str(tmp_path))
    assert resolved.recipe.micro_batch_size_per_process == size
    assert resolved.identity != context.identity


ERRORS = {
    "torch's own": (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
    "one of a library": (RuntimeError("CUDA error: out of memory."), False),
}


@pytest.mark.parametrize(("error", "survives"), ERRORS.values(), ids=ERRORS)
def test_running_out_of_memory_is_an_answer(error: RuntimeError, survives: bool) -> None:
    def trial() -> None:
        raise error

    assert build._fits_gpu(trial, math.inf) is survives


def test_another_failure_is_none() -> None:
    def trial() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        build._fits_gpu(trial, math.inf)
