"""A search without Baton, one configuration after the other: `python -m benchmarks.search_script SETTINGS_JSON`."""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.modules["wandb"] = None  # type: ignore[assignment]  # an image without it: TRL imports whatever is installed

import datasets
import torch
import transformers
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from benchmarks.mark import mark
from benchmarks.script import arguments


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    datasets.disable_progress_bars()
    lora = settings["lora"]
    mark("begun")
    tokens = datasets.load_from_disk(f"{settings['inputs']}/tokens")
    held_out = tokens.select(range(settings["rows"]))  # some that train: what they cost is the same
    for rate in settings["rates"]:
        transformers.set_seed(settings["seed"])
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings["base"], dtype=torch.float32),
            args=arguments(
                settings,
                learning_rate=rate,
                dataset_kwargs={"skip_prepare_dataset": True},
                eval_strategy="steps",
                eval_steps=settings["every"],
                per_device_eval_batch_size=settings["batch"],
            ),
            train_dataset=tokens,
            eval_dataset=held_out,
            processing_class=AutoTokenizer.from_pretrained(settings["base"]),
            peft_config=LoraConfig(
                r=lora["r"], lora_alpha=lora["alpha"], target_modules=lora["target_modules"], task_type="CAUSAL_LM"
            ),
        )
        trainer.train()
        trainer.save_model(f"{settings['folder']}/{rate}")
        mark("trained", rate=rate)
    os._exit(0)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as settings_file:
        main(json.load(settings_file))
