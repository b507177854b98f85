"""A Baton checkpoint is a Hugging Face checkpoint: a plain TRL script resumes from it, to the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.recipe.recipe import Recipe
from baton.runs.run import Run

SCRIPT = """
import sys, datasets
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

base, tokens, checkpoint, output = sys.argv[1:]
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(base),
    args=SFTConfig(output, seed=5, data_seed=5, max_steps=15, per_device_train_batch_size=4,
                   gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="linear",
                   gradient_checkpointing=False, bf16=False, max_length=48, logging_steps=2, save_strategy="no",
                   report_to="none", dataset_kwargs={"skip_prepare_dataset": True}),
    train_dataset=datasets.load_from_disk(tokens),
    processing_class=AutoTokenizer.from_pretrained(base),
    peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.3),
)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model(output)
"""


@pytest.mark.slow
def test_a_plain_trl_script_resumes_and_ends_on_the_same_weights(
    tmp_path: Path, recipes: dict[str, Recipe], undisturbed: dict[str, Run], base_model: str, legs: Any
) -> None:
    from safetensors.numpy import load_file

    run = undisturbed["lora"]
    store = CheckpointStore(run)
    halfway, last = store.read(8), legs.final(run)
    assert halfway
    tokens = run.storage.uri(_tokens_path(run))
    output = tmp_path / "out"
    command = [sys.executable, "-c", SCRIPT, base_model, f"{tokens}/train", store.uri(halfway), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours = load_file(f"{store.uri(last)}/adapter_model.safetensors")
    theirs = load_file(output / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    before = load_file(f"{store.uri(halfway)}/adapter_model.safetensors")
    assert any((before[name] != theirs[name]).any() for name in ours)


def _tokens_path(run: Run) -> str:
    from baton.store.manifest import read_manifest

    prefix = run.require("tokens.json")["prefix"]
    manifest = read_manifest(run.storage, prefix)
    assert manifest
    return manifest.path(prefix)
