"""Supervised fine-tuning and training from scratch, by TRL's `SFTTrainer`."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from trl import SFTConfig, SFTTrainer

from components.shared.recipe import Adapter, Recipe
from components.train_chunk.resume import Resumable


class ChunkedSFTTrainer(Resumable, SFTTrainer):
    """`SFTTrainer` that checks what it restored."""


def build(
    recipe: Recipe,
    arguments: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: Dataset,
    held_out: Dataset | None,
) -> Trainer:
    """Builds the trainer on rows that have `input_ids` and `labels`."""
    config = SFTConfig(
        **arguments,
        max_length=recipe.data.max_length,
        dataset_kwargs={"skip_prepare_dataset": True},
        packing=False,
    )
    return ChunkedSFTTrainer(
        model=model,
        args=config,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora(recipe.adapter),
    )


def lora(adapter: Adapter | None) -> LoraConfig | None:
    """Returns PEFT's configuration of the recipe's adapter."""
    if adapter is None:
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
    )
