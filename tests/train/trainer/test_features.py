"""The class of a trainer: what stands before TRL's, by recipe, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from baton.train.protocol import ChunkTrainer, Resumption
from tests.support import tiny
from tests.train.trainer.test_joining import begin

ROWS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in tiny.PAIRS]
PAIRS = {"method": "dpo"}
TEXT = {"method": "sft"}
WORKERS = {"parallel": {"virtual_workers": 2}}


def composed(base: str, folder: Path, training: dict[str, Any]) -> Any:
    """Returns a trainer."""
    given = tiny.recipe(base, training=training)
    return tiny.trainer(given, tiny.tokens(given, tiny.PAIRS if training["method"] == "dpo" else ROWS), folder)


def names(trainer: Any) -> list[str]:
    """Returns the classes of Baton's, in the order in which they act."""
    return [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("baton.")]


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (PAIRS, "ExactDPO WeighedRows"),
        (TEXT, "ExactSFT WeighedRows"),
        ({**PAIRS, "dpo": {"sync_reference": {"every": 1}}}, "ExactDPO MovingReference WeighedRows"),
        ({**TEXT, "guard": {}}, "ExactSFT Guarded WeighedRows"),
        ({**TEXT, "groups": [{"pattern": "mlp"}]}, "ExactSFT WeighedRows ParamGroups"),
        ({**TEXT, "guard": {}, **WORKERS}, "ExactSFT Guarded VirtualWorkers WeighedRows"),
    ],
)
def test_a_trainer_has_the_features_of_its_recipe_alone(
    training: dict[str, Any], expected: str, tiny_base: str, tmp_path: Path
) -> None:
    trainer = composed(tiny_base, tmp_path, training)
    assert names(trainer) == [*expected.split(), "ExactResume", "ChunkTrainer"]
    assert type(trainer).__name__ == ("DPOTrainer" if training["method"] == "dpo" else "SFTTrainer")


@pytest.mark.parametrize(
    ("resumption", "expected"),
    [
        (Resumption(), []),
        (Resumption(ranks=2, strategy="fsdp", is_reshaped=True), ["LoadFromShards"]),
        (Resumption(ranks=2, strategy="ddp", is_reshaped=True), []),
    ],
)
def test_a_chunk_adds_what_its_checkpoint_asks_for(
    resumption: Resumption, expected: list[str], tiny_base: str, tmp_path: Path
) -> None:
    trainer = composed(tiny_base, tmp_path, TEXT)
    before = names(trainer)
    begin(trainer, resumption)
    assert names(trainer) == [*expected, *before]


@pytest.mark.parametrize(("optimizer", "of_head"), [("ademamix_8bit", "float32"), ("adamw_bnb_8bit", "uint8")])
def test_weights_without_whole_blocks_have_ademamix_averages_of_32_bits(
    optimizer: str, of_head: str, tiny_base: str, tmp_path: Path
) -> None:
    """On a GPU, both averages would write one scale, in any order."""
    trainer = composed(tiny_base, tmp_path, {**TEXT, "optimizer": optimizer})
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=256, num_attention_heads=1, num_hidden_layers=1
    )
    model = trainer.model = LlamaForCausalLM(config)
    steps = trainer.create_optimizer()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    steps.step()

    def kind(weight: torch.nn.Parameter) -> str:
        return str(steps.state[weight]["state1"].dtype).removeprefix("torch.")

    assert model.lm_head.weight.numel() % 256
    assert kind(model.lm_head.weight) == of_head
    assert kind(model.model.layers[0].mlp.gate_proj.weight) == "uint8"


def test_what_is_not_upstreams_has_no_name_of_upstreams() -> None:
    """A method that upstream calls, and that was meant as another one, would go unnoticed."""
    from baton.train import build, generation, guard, references, sharding, trainer, virtual, weighing

    upstream = {name for name in vars(Trainer) if not name.startswith("_")}
    meant = {
        *("compute_loss", "create_accelerator_and_postprocess", "create_model_card", "create_optimizer", "log"),
        *("evaluation_loop", "floating_point_ops", "get_batch_samples", "get_eval_dataloader", "get_train_dataloader"),
        *("is_world_process_zero", "prediction_step", "save_model", "training_step"),
    }
    ours: set[type] = {
        kind
        for module in (build, generation, guard, references, sharding, trainer, virtual, weighing)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, ChunkTrainer)
    }
    assert len(ours) >= 13
    assert {name for kind in ours for name in vars(kind)} & upstream == meant
