"""A restored optimizer's state lies where a fresh one's does; bitsandbytes pages what it makes, not what it loads."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from baton.checkpoint.digest import tree_digest
from baton.train import trainer as settling
from tests.support import tiny


def stepped(kind: str, size: int) -> Any:
    """An optimizer of bitsandbytes with the state of one step."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(size, 400))
    optimizer = getattr(bitsandbytes.optim, kind)([weight], lr=0.01)
    weight.square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[torch.Tensor]]:
    """Has bitsandbytes page, which it can on GPUs alone, when it is called; returns what is paged."""
    paged: list[torch.Tensor] = []

    def get_paged(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        page: Any = torch.full(shape, 7, dtype=dtype)
        page.is_paged = True
        paged.append(page)
        return page

    def begin() -> list[torch.Tensor]:
        monkeypatch.setattr(pytest.importorskip("bitsandbytes").functional, "get_paged", get_paged)
        return paged

    return begin


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("kind", ["PagedAdamW8bit", "PagedAdamW32bit", "PagedLion8bit", "AdEMAMix8bit"])
def test_large_state_is_paged_and_keeps_its_values(kind: str, pages: Callable[[], list[torch.Tensor]]) -> None:
    optimizer = stepped(kind, 300)
    values = next(iter(optimizer.state.values()))
    before = {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
    paged = pages()
    settling.page_state(optimizer)
    names = {"state1", "state2"} & values.keys()
    assert len(paged) == len(names) > 0
    assert all(values[name].is_paged for name in names)
    assert all(torch.equal(values[name], before[name]) for name in names)
    settling.page_state(optimizer)  # what is paged is left alone
    assert len(paged) == len(names)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_a_checkpoint_is_loaded_to_pages(
    pages: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU, which is not there: what is loaded waits in the host's memory."""
    first, resumed = stepped("PagedAdamW32bit", 300), stepped("PagedAdamW32bit", 300)
    first.step()
    assert tree_digest(resumed.state_dict()) != tree_digest(first.state_dict())
    for value in next(iter(first.state.values())).values():
        if isinstance(value, torch.Tensor):
            value.is_paged = True  # as on a GPU; a file keeps it
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert saved["state"][0]["__bnb_optimizer_quant_state__"]["state1"].is_paged
    optimizer = SimpleNamespace(optimizer=resumed, load_state_dict=lambda state: resumed.load_state_dict(state))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        paged = pages()
        with settling.free_load_memory(optimizer):
            assert resumed.load_state_dict.keywords == {"move_to_device": False}
            optimizer.load_state_dict(saved)
    assert len(paged) == 2
    assert {id(page) for page in paged} <= {id(value) for value in next(iter(resumed.state.values())).values()}
    assert "load_state_dict" not in vars(resumed)
    assert tree_digest(resumed.state_dict()) == tree_digest(first.state_dict())


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_small_state_is_not_paged() -> None:
    optimizer = stepped("PagedAdamW32bit", 3)
    settling.page_state(optimizer)
    assert not hasattr(next(iter(optimizer.state.values()))["state1"], "is_paged")


def test_any_other_optimizer_is_left_as_it_is() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with settling.free_load_memory(optimizer):
        optimizer.load_state_dict(before)
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_loading_takes_is_given_back(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what only a collection of garbage frees."""

    class Held:
        pass

    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    held: Any = Held()
    held.itself = held
    gone = weakref.ref(held)
    gc.disable()
    try:
        with settling.free_load_memory(SimpleNamespace(load_state_dict=print)):
            del held
            assert gone() is not None
        assert gone() is None
    finally:
        gc.enable()
    assert emptied == [True] * on_gpu


def test_without_a_gpu_nothing_is_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SimpleNamespace(is_paged=True, load_state_dict=print, state={})
    monkeypatch.setattr(settling, "page_state", lambda _: pytest.fail("paged"))
    load = optimizer.load_state_dict
    with settling.free_load_memory(SimpleNamespace(optimizer=optimizer)):
        assert optimizer.load_state_dict is load


def test_an_adapter_is_loaded_in_the_type_it_was_trained_in(tmp_path: Path) -> None:
    """TRL trains one in bfloat16 on a base in few bits; PEFT loads it in 32 bits, and its optimizer's state follows."""
    given = tiny.recipe(
        tiny.make_base(tmp_path / "base"),
        adapter={"type": "lora", "r": 2, "target_modules": ["q_proj"]},
        training={"method": "dpo"},
    )
    trainer = tiny.trainer(given, tiny.tokens(given, tiny.PAIRS), tmp_path / "out")
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.data = torch.randn_like(weight).to(torch.bfloat16)
    before = [weight.clone() for weight in weights]
    folder = str(tmp_path / "saved")
    trainer.save_model(folder)

    transformers.Trainer._load_from_checkpoint(trainer, folder)
    assert {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad} == {torch.float32}
    for weight in (weight for weight in trainer.model.parameters() if weight.requires_grad):
        weight.data = torch.zeros_like(weight, dtype=torch.bfloat16)
    trainer._load_from_checkpoint(folder)
    after = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in after} == {torch.bfloat16}
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
