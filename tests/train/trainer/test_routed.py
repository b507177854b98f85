"""Router losses reach the loss of every method, once, however many micro-batches a step has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from baton.models import loading
from tests.support import tiny


@pytest.fixture(scope="module")
def mixture(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny mixture of experts, with the tiny base's tokenizer."""
    folder = str(tmp_path_factory.mktemp("mixture") / "base")
    tokenizer = loading.load_tokenizer(tiny_base)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


NO_REWARD = {"use": "length", "options": {"target": 1000, "width": 1}}
WRITES = {"rewards": [NO_REWARD], "num_generations": 2, "max_completion_length": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in ("sft", "dpo", "kto", "reward", "orpo", "cpo")},
    "grpo": {"method": "grpo", "grpo": WRITES},
    "rloo": {"method": "rloo", "rloo": {**WRITES, "beta": 0.0}},
}
LORA = {"r": 4, "target_modules": ["q_proj"]}


def rows_of(method: str) -> list[dict[str, Any]]:
    """Returns rows that the method learns from."""
    if method == "sft":
        return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in tiny.PAIRS]
    return [{"prompt": pair["prompt"]} for pair in tiny.PAIRS] if method in ("grpo", "rloo") else tiny.PAIRS


def first_loss(method: str, base: str, folder: Path, micro: int, z: float, **sections: Any) -> float:
    """Returns the loss of one step."""
    training = {**SETTINGS[method], "micro_batch_size": micro, "max_steps": 1, "router": {"balance": 0.0, "z": z}}
    recipe = tiny.recipe(base, training=training, **sections)
    trainer = tiny.trainer(recipe, tiny.tokens(recipe, rows_of(method)), folder)
    trainer.train()
    (loss,) = tiny.losses(trainer)
    return loss


@pytest.mark.parametrize("method", SETTINGS)
def test_the_routers_loss_is_added_once(method: str, mixture: str, tmp_path: Path) -> None:
    """Means over micro-batches: whether there are one, two or four changes little, where a sum would double it."""
    added = [
        first_loss(method, mixture, tmp_path, micro, 1.0) - first_loss(method, mixture, tmp_path, micro, 0.0)
        for micro in (8, 4, 2)
    ]
    assert added[0] > 1
    assert added[1:] == pytest.approx([added[0]] * 2, rel=0.02)


def test_it_is_added_where_an_adapter_is_trained(mixture: str, tmp_path: Path) -> None:
    added = first_loss("dpo", mixture, tmp_path, 8, 1.0, adapter=LORA)
    assert added - first_loss("dpo", mixture, tmp_path, 8, 0.0, adapter=LORA) > 1


def test_it_is_the_z_loss_of_what_the_routers_give_for_each_token(mixture: str, tmp_path: Path) -> None:
    """By hand: the squared logarithm of the sum of exponentials, mean over tokens without padding, mean over layers."""
    training = {"method": "sft", "max_steps": 1, "router": {"balance": 0.0, "z": 1.0}}
    recipe = tiny.recipe(mixture, training=training)
    trainer = tiny.trainer(recipe, tiny.tokens(recipe, rows_of("sft")), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    model = loading.load_model(mixture).eval()
    layers = []
    for layer in range(2):
        squares = []
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            with torch.no_grad():
                logits = model.model(ids[None, : int(mask.sum())], output_router_logits=True).router_logits[layer]
            squares.append(logits.double().exp().sum(-1).log().square())
        layers.append(torch.cat(squares).mean())
    expected = float(sum(layers) / 2)
    added = first_loss("sft", mixture, tmp_path, 8, 1.0) - first_loss("sft", mixture, tmp_path, 8, 0.0)
    assert added == pytest.approx(expected, rel=1e-5)
