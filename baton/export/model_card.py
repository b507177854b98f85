"""The model card: README.md with the Hub's metadata."""

from __future__ import annotations

import json
import os
import re

from baton.checkpoint import seals
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.models import vocabulary
from baton.recipe.recipe import Recipe
from baton.runs.documents import SplitCounts
from baton.runs.outcomes import EvaluationResult
from baton.runs.run import Run

LICENCES = {"Apache License": "apache-2.0", "MIT License": "mit", "GNU GENERAL PUBLIC LICENSE": "gpl"}
"""How the text of a licence begins → the Hub's name for it."""
MAX_TOKENS = 20  # new tokens that are named, at most
HUB_TIMEOUT = 10  # seconds
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Imports and code that load a format; only these formats have a card.
LOADING = {
    "safetensors": (
        "from transformers import AutoModelFor{kind}, AutoTokenizer",
        "model = AutoModelFor{kind}.from_pretrained(folder)\ntokenizer = AutoTokenizer.from_pretrained(folder)",
    ),
    "adapter": (
        "from peft import AutoPeftModelFor{kind}\nfrom transformers import AutoTokenizer",
        "model = AutoPeftModelFor{kind}.from_pretrained(folder)\ntokenizer = AutoTokenizer.from_pretrained(folder)",
    ),
    "gguf": ("import llama_cpp", "model = llama_cpp.Llama(folder + '/{file}')"),
    "onnx": (
        "import onnxruntime",
        "session = onnxruntime.InferenceSession(folder + '/model.onnx')  # input_ids, attention_mask → logits",
    ),
}
LIBRARIES = {"safetensors": "transformers", "adapter": "peft", "gguf": "gguf", "onnx": "onnx"}


def write(
    run: Run,
    recipe: Recipe,
    checkpoint: Checkpoint,
    licence: str | None,
    *,
    export_format: str,
    target: str,
    check: str,
) -> None:
    """Writes the card of one export into its folder; `check` is the finding of its load back, in words."""
    ledger = seals.ledger_of(run)
    seal = f"\n- newest seal: `{ledger.head.digest}`" if ledger and ledger.head else ""
    parts = [
        f"---\n{_metadata(recipe, licence, export_format)}\n---",
        f"# {recipe.name}",
        f"Trained by Baton, run `{run.name}`, {checkpoint.step} steps in {recipe.num_chunks} chunk(s).",
        _training(run, recipe),
        _new_tokens(target),
        _figures(run.read(EvaluationResult)),
        f"## Lineage\n\n- run: {run.uri}\n"
        f"- checkpoint: {CheckpointStore(run).uri(checkpoint)}, step {checkpoint.step}\n"
        f"- state digest: `{checkpoint.digest}`\n- resume proof: `{checkpoint.meta.chain}`{seal}",
        f"## Loading\n\n{_loading(recipe, export_format, target)}\n\nLoaded back and compared after export: {check}.",
    ]
    with open(f"{target}/README.md", "w", encoding="utf-8") as file:
        file.write("\n\n".join(part for part in parts if part) + "\n")


def licence(recipe: Recipe, base_folder: str | None) -> str | None:
    """Returns the recipe's licence, else the base model's where it can be found."""
    if recipe.export.licence or base_folder is None or recipe.model.base is None:
        return recipe.export.licence
    if os.path.isfile(f"{base_folder}/README.md"):
        from huggingface_hub import ModelCard

        try:
            named = ModelCard.load(f"{base_folder}/README.md", ignore_metadata_errors=True).data.license
        except ValueError:
            named = None
        if isinstance(named, str):
            return named
    if os.path.isfile(f"{base_folder}/LICENSE"):
        with open(f"{base_folder}/LICENSE", encoding="utf-8", errors="replace") as file:
            head = file.read(400)
        return next((name for text, name in LICENCES.items() if text in head), None)
    return _hub_licence(recipe.model.base, recipe.model.revision) if not os.path.isdir(recipe.model.base) else None


def _hub_licence(base: str, revision: str | None) -> str | None:
    if not HUB_ID.fullmatch(base):
        return None
    from huggingface_hub import HfApi

    try:
        about = HfApi().model_info(base, revision=revision, timeout=HUB_TIMEOUT).card_data
    except Exception:  # a card without licence is better than no export
        return None
    licence = about.license if about else None
    return licence if isinstance(licence, str) else None


def _metadata(recipe: Recipe, licence: str | None, export_format: str) -> str:
    from huggingface_hub import ModelCardData

    base = recipe.model.base if recipe.model.base and HUB_ID.fullmatch(recipe.model.base) else None
    sources = [
        source.uri.removeprefix("hf://datasets/") for source in recipe.data.sources if source.uri.startswith("hf://")
    ]
    adapter = [f"base_model:adapter:{base}"] if base and export_format == "adapter" else []
    data = ModelCardData(
        license=licence,
        base_model=None if base and os.path.isdir(base) else base,
        datasets=sources or None,
        library_name=LIBRARIES[export_format],
        tags=["baton", recipe.training.method, *(["lora"] if recipe.adapter else []), *adapter],
        pipeline_tag="text-classification" if recipe.training.spec.scores else "text-generation",
    )
    return str(data.to_yaml())


def _training(run: Run, recipe: Recipe) -> str:
    split = run.read(SplitCounts) or SplitCounts()
    scratch = recipe.model.from_scratch
    base = recipe.model.base or f"from scratch ({scratch and scratch.architecture})"
    revision = f", revision {recipe.model.revision}" if recipe.model.revision else ""
    training, adapter = recipe.training, recipe.adapter
    lines = [
        f"- base: {base}{revision}",
        f"- method: {training.method}" + (f", LoRA of rank {adapter.r}" if adapter else ""),
        f"- data: {', '.join(source.uri for source in recipe.data.sources)}; {split.train} training rows, "
        f"{split.eval} held out",
        f"- {training.optimizer}, learning rate {training.learning_rate}, batches of {training.batch_size} rows, "
        f"seed {recipe.seed}",
    ]
    if training.second_model:
        role, named = training.second_model
        lines.append(f"- {role}: {named.base}" + (f", revision {named.revision}" if named.revision else ""))
    if recipe.model.quantization:
        lines.append(f"- base held in {recipe.model.quantization.bits} bits in training; merged in full precision")
    return "## Training\n\n" + "\n".join(lines)


def _new_tokens(target: str) -> str:
    path = f"{target}/tokenizer_config.json"
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8") as file:
        new = json.load(file).get(vocabulary.NEW)
    if not new:
        return ""
    shown = ", ".join(f"`{token}`" for token in new[:MAX_TOKENS])
    rest = f" and {len(new) - MAX_TOKENS} more" if len(new) > MAX_TOKENS else ""
    return (
        f"## Tokens\n\nThe base lacks {len(new)} of the tokens, whose rows are trained and come with this: "
        f"{shown}{rest}."
    )


def _figures(evaluation: EvaluationResult | None) -> str:
    if evaluation is None or not evaluation.after:
        return ""

    def number(value: float | None) -> str:
        return f"{value:.4g}" if isinstance(value, int | float) else ""

    intervals = (evaluation.intervals or {}).get("after") or {}
    rows = []
    for name, value in evaluation.after.items():
        low, high = intervals.get(name) or (None, None)
        extent = f" ({low:.4g} to {high:.4g})" if low is not None else ""
        rows.append(f"| {name} | {number(evaluation.before.get(name))} | {number(value)}{extent} |")
    side = "rows kept for testing" if evaluation.side == "test" else "held-out rows"
    verdict = evaluation.gate
    gate = f"\n\nGate: {'accepted' if verdict.passed else 'rejected'}." if verdict else ""
    head = f"## Figures\n\nOn {side}, before and after training:\n\n| figure | before | after |\n|---|---|---|\n"
    return head + "\n".join(rows) + gate


def _loading(recipe: Recipe, export_format: str, target: str) -> str:
    kind = "SequenceClassification" if recipe.training.spec.scores else "CausalLM"
    file = next((name for name in sorted(os.listdir(target)) if name.endswith(".gguf")), "")
    code = "\n\n".join(LOADING[export_format]).format(kind=kind, file=file)
    if recipe.model.trust_remote_code:
        code = code.replace("from_pretrained(folder)", "from_pretrained(folder, trust_remote_code=True)")
    return f"```python\n{code}\n```"
