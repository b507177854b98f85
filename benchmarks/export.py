"""The other sides' inputs, of a run of ours: `python -m benchmarks.export RUN_URI FOLDER`.

The same tokenizer files, the same model configuration, and the same rows, tokenized and packed once.
"""

import json
import sys
import tempfile

import datasets
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTTrainer

from baton.models import loading, trained
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import read_manifest
from benchmarks.mark import mark
from benchmarks.script import arguments


def main(run_uri: str, folder: str) -> None:
    run = Run.open(run_uri)
    recipe = run.recipe()
    assert recipe.model.from_scratch
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        tokens = trained.tokens_folder(run, scratch)
        tokenizer = loading.load_tokenizer(f"{tokens}/tokenizer")
        tokenizer.save_pretrained(folder)
        loading.scratch_config(recipe.model.from_scratch, tokenizer, recipe.data.max_length).save_pretrained(folder)
        prefix = f"data/{run.require('data.json')['digest']}/split"
        manifest = read_manifest(run.storage, prefix)
        assert manifest
        split = bundle.fetch(run.storage, prefix, manifest, f"{scratch}/split")
        with open(f"{split}/train.jsonl", encoding="utf-8") as file:
            rows = [{**row, "prompt": row["prompt"] + recipe.data.separator} for row in map(json.loads, file)]
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        settings = {"folder": scratch, "seed": recipe.seed, "steps": 1, "batch": 1, "length": recipe.data.max_length}
        trainer = SFTTrainer(
            model, arguments(settings), train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train_dataset.save_to_disk(f"{folder}/tokens")
    mark("exported", parameters=sum(value.numel() for value in model.parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:3])
