"""The script's inputs, taken from a run of ours: `python -m benchmarks.export RUN_URI FOLDER`.

The same tokenizer files, the same model configuration and the same rows, so that both sides train the same.
"""

import json
import sys
import tempfile

from baton.models import loading, trained
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import read_manifest


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
        with open(f"{split}/train.jsonl", encoding="utf-8") as rows, open(f"{folder}/rows.jsonl", "w") as target:
            for line in rows:
                row = json.loads(line)
                target.write(json.dumps({**row, "prompt": row["prompt"] + recipe.data.separator}) + "\n")
    print(json.dumps({"mark": "exported", "parameters": parameters(folder)}))


def parameters(folder: str) -> int:
    """Counts the model's parameters without giving them memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(value.numel() for value in model.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:3])
