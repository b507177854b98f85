"""The page about the gallery, made of its recipes."""

from __future__ import annotations

import re
from pathlib import Path

from baton.recipe import load
from baton.recipe.recipe import Recipe
from tests.gallery import recipes

INTRODUCTION = """\
# A gallery of recipes

<!-- Written by `make docs` from pipelines/recipes/gallery/; edit those recipes, or tests/gallery/page.py, instead. -->

Recipes for models that people use, one for each way to train. Each is whole: chat template, layers that are adapted,
learning rate, batch, precision, chunks and checkpoints for spot GPUs, with the reason beside what is not plain. Take
the nearest one, change `data.source`, and look at what `baton validate` says.

```
baton validate qwen3-sft
baton recipes show qwen3-sft > mine.yaml
baton run qwen3-sft --set data.source=rows.jsonl
baton submit qwen3-sft --store s3://bucket --image REGISTRY/baton-gpu:0.1.0 --wait
```

"""

TABLE = """\
| recipe | model | method | GPU | memory, estimated | data | twin tested | real weights run |
|---|---|---|---|---|---|---|---|
"""

AFTER = """
## What these figures and tests are worth

- **Memory** is what `baton validate` estimates from the model's configuration. It has not been measured on a GPU for
  these models, so nothing is known here of how far off it is; leave a tenth free, or more. The table's numbers are
  those in the recipes' headers, and a test makes both anew.
- **Real weights run: no** holds for all of them. Nothing here says how good a model comes out, nor how long it takes.
- **Twin tested** says that the same recipe runs in Baton's own tests with a tiny model of the same architecture: the
  model's configuration with two layers of width 32 and everything else as it is (shared keys, windows, norms on all
  sides, tied embeddings, experts and router, sinks, MXFP4 files, layers without positions), random weights, rows of the
  same shape, a small tokenizer with the model's kind of chat template, six steps on a CPU. Two chunks must end on the
  bits of one, and the export must be loaded by `from_pretrained`. What needs CUDA is off there: 4 and 8 bits, 16-bit
  precision, flash attention; so are `torch.compile`, and evaluation and gate but in the retraining. `make test` runs
  two of them, `make test-all` all.
- The configurations ([tests/gallery/configs](../../tests/gallery/configs/README.md)) were written down from public
  sources; each comes to the published number of weights, to the last one.
- Names of models and data sets, their licences, and which are gated were looked up in public sources, not at the hub
  itself. Licences change; read the pages before you train.

## Gated models

Llama and Gemma are gated, and Mistral may be: accept the terms on the model's page with your account, then give a token
of that account.

| where | how |
|---|---|
| this machine | `HF_TOKEN` in the environment of `baton run` |
| Kubeflow | `kubectl create secret generic huggingface --from-literal=token=hf_… -n NAMESPACE` |

The recipes name that Secret, `resources.secret_env: {HF_TOKEN: huggingface/token}`, and it then has to be there. Pods
also need a way out to the hub: `k8s/components/hub-access`.

## Offline

`baton validate` looks a hub model's configuration up, and says `memory: not estimated` where it cannot. From a checkout
`--set model.base=tests/gallery/configs/FOLDER` estimates from the published configuration there.
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
