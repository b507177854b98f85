"""What one would write with TRL alone: the rows as texts, the same settings, one process, no chunks.

`python plain.py METHOD BASE ROWS.jsonl OUTPUT` trains and writes the losses of all steps and the weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import datasets
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

COMMON: dict[str, Any] = {
    "seed": 7,
    "data_seed": 7,
    "max_steps": 9,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for a hundred tokens, less with the distance from it."""
    return [max(0.0, 1.0 - abs(len(ids) - 100) / 100) for ids in completion_ids]


def shortness(completion_ids: list[list[int]], completions: list[str], **_: Any) -> list[float]:
    """Few different tokens."""
    return [len(set(ids)) / 10 + len(said) / 100 for ids, said in zip(completion_ids, completions, strict=True)]


def unpaired(rows: list[dict[str, Any]]) -> datasets.Dataset:
    """Each answer of a pair with its label, in an order drawn by the seed."""
    rated = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows
        for side in ("chosen", "rejected")
    ]
    return datasets.Dataset.from_list(rated).shuffle(seed=7)


def build(method: str, base: str, rows: list[dict[str, Any]], output: str) -> Any:
    """Returns TRL's trainer."""
    set_seed(7)
    kind = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(base, dtype=torch.float32, **({"num_labels": 1} if method == "reward" else {}))
    given: dict[str, Any] = {
        "model": model,
        "train_dataset": unpaired(rows) if method == "kto" else datasets.Dataset.from_list(rows),
        "processing_class": AutoTokenizer.from_pretrained(base),
    }
    if method == "sft-lora":
        given["peft_config"] = LoraConfig(**LORA, lora_dropout=0.3)
    if method in ("sft", "sft-lora"):
        return SFTTrainer(args=SFTConfig(output, max_length=48, **COMMON), **given)
    if method == "dpo":
        return DPOTrainer(args=DPOConfig(output, max_length=48, beta=0.1, **COMMON), **given)
    if method == "kto":
        return KTOTrainer(args=KTOConfig(output, max_length=48, beta=0.1, **COMMON), **given)
    if method == "reward":
        return RewardTrainer(args=RewardConfig(output, max_length=48, **COMMON), **given)
    if method == "distillation":
        teacher = AutoModelForCausalLM.from_pretrained(f"{base}-teacher", dtype=torch.float32)
        config = DistillationConfig(output, max_completion_length=6, **COMMON)
        return DistillationTrainer(args=config, teacher_model=teacher, **given)
    config = GRPOConfig(output, num_generations=2, max_completion_length=6, **COMMON)
    return GRPOTrainer(args=config, reward_funcs=[length, shortness], **given)


def train(method: str, base: str, rows_path: str, output: str) -> None:
    """Trains, and writes `losses.json` and the weights."""
    torch.set_num_threads(1)
    with open(rows_path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = [{**row, "prompt": row["prompt"] + "\n"} for row in rows]
    trainer = build(method, base, rows, output)
    trainer.train()
    trainer.save_model(output)
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    with open(f"{output}/losses.json", "w", encoding="utf-8") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    train(*sys.argv[1:])
