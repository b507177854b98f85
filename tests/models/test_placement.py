"""A model that one GPU has no room for is spread over all; spread, it answers as it does whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from baton.errors import UserError
from baton.models import loading

MB = 2**20


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, tie_word_embeddings=tied, **sizes)).eval()


@pytest.mark.parametrize("free", [{}, {0: 9 * MB}, {0: 9 * MB, 1: 9 * MB}], ids=["none", "one", "two"])
def test_what_fits_one_stays_on_one(free: dict[int, int]) -> None:
    assert loading.spread_over(llama(), free) is None  # its weights are 2.3 MB


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_spread_and_never_cut(tied: bool) -> None:
    spread = loading.spread_over(llama(tied=tied), {0: 2 * MB, 1: 2 * MB})
    assert spread
    assert set(spread.values()) == {0, 1}
    assert {f"model.layers.{number}" for number in range(8)} <= spread.keys()
    assert spread["model.embed_tokens"] == 0


def test_the_blocks_below_an_adapter_are_spread() -> None:
    adapted = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    spread = loading.spread_over(adapted, {0: 2 * MB, 1: 2 * MB})
    assert spread
    assert {f"base_model.model.model.layers.{number}" for number in range(8)} <= spread.keys()


def test_what_fits_none_is_refused_and_not_left_to_the_disk() -> None:
    with pytest.raises(UserError, match=r"2 GPUs have 0.0 GB for them.*resources.gpus"):
        loading.spread_over(llama(), {0: MB, 1: MB // 2})


def test_one_in_few_bits_stays_where_it_is() -> None:
    model = llama()
    model.is_quantized = True
    assert loading.place_model(model) is model


def test_a_model_in_two_places_answers_as_a_whole_one(tmp_path: Path) -> None:
    """On a machine without GPUs the second place is a file, from which a block is read when it is its turn."""
    ids = torch.arange(24).reshape(2, 12)
    whole = llama()
    spread = loading.spread_over(whole, {0: 2 * MB, 1: 2 * MB})
    assert spread
    with torch.inference_mode():
        expected, written = whole(input_ids=ids).logits, whole.generate(ids, max_new_tokens=4, do_sample=False)
    places = {name: "disk" if device else "cpu" for name, device in spread.items()}
    parted = dispatch_model(whole, places, main_device="cpu", offload_dir=str(tmp_path))
    assert parted.lm_head.weight.is_meta
    with torch.inference_mode():
        assert torch.equal(parted(input_ids=ids.to(parted.device)).logits, expected)
        assert torch.equal(parted.generate(ids, max_new_tokens=4, do_sample=False), written)


@pytest.mark.parametrize("spread", [None, {"model": "cpu", "lm_head": "cpu"}], ids=["whole", "spread"])
def test_a_model_that_was_placed_is_taken_back_and_placed_again(spread: dict[str, str] | None) -> None:
    model, ids = llama(), torch.arange(8)[None]
    before = model(ids).logits
    for _ in range(2):
        placed = dispatch_model(model, spread, force_hooks=True) if spread else loading.place_model(model)
        assert torch.equal(placed(ids).logits.cpu(), before) or torch.cuda.is_available()
        assert hasattr(placed.model, "_hf_hook") == bool(spread)
        loading.move_to_cpu(placed)
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
