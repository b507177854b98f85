"""The gallery's recipes: what their headers say, what they are estimated to take, and each with its twin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.source import hardware, prepare
from tests.gallery import rows, twins

Document = dict[str, Any]

GALLERY = Path(__file__).parents[2] / "pipelines/recipes/gallery"
PATHS = sorted(GALLERY.glob("*.yaml"))
FIELDS = ("model", "data", "gpu", "memory", "twin", "not run")
"""What a header says after its first line, in this order."""
STEPS = 6


@dataclass(frozen=True)
class Header:
    """The comment that a recipe begins with.

    Attributes:
        about: Its first line: what the recipe does.
        fields: What it says of each of `FIELDS`.
    """

    about: str
    fields: dict[str, str]


def header(path: Path) -> Header:
    """Returns the header of a recipe."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (re.fullmatch(r"# ([a-z ]+): +(.+)", line) for line in lines if line.startswith("# "))
    return Header(lines[0].removeprefix("# "), {match[1]: match[2] for match in found if match and match[1] in FIELDS})


def sources(recipe: Recipe) -> list[str]:
    """Returns the addresses of a recipe's rows, each once."""
    parts = recipe.phase_recipes() or [recipe]
    return list(dict.fromkeys(source.uri for part in parts for source in part.data.sources))


def estimated(path: Path, folder: Path) -> str:
    """Returns what `baton validate` estimates of a recipe, in words: of each phase, and of a sweep's largest trial.

    Args:
        path: The recipe.
        folder: For the tokenizer of a model from scratch.
    """
    overrides = []
    document = load.read(str(path))
    if base := document["model"].get("base"):
        overrides.append(f"model.base={json.dumps(twins.config_folder(base))}")
    else:
        name = document["model"]["tokenizer"]["base"]
        twins.make(name, str(folder / "tokenizer"), ())
        overrides.append(f"model.tokenizer.base={json.dumps(str(folder / 'tokenizer'))}")
    for name, values in (document.get("sweep") or {}).get("parameters", {}).items():
        overrides += [f"{name}={max(values)}"] if isinstance(values, list) else []
    lines = list(hardware.memory_report(prepare.load(str(path), overrides).recipe))
    assert not any("not estimated" in line for line in lines), lines
    assert not any(line.startswith("warning") for line in lines), lines
    of = [match[1] for line in lines if (match := re.match(r"memory of one GPU(?: of \S+-(\S+?))?, estimated", line))]
    totals = [match for line in lines if (match := re.match(r"  total +([\d.]+) GiB  of ([\d.]+) GiB", line))]
    sizes = [f"{name} {total[1]}" if name else total[1] for name, total in zip(of, totals, strict=True)]
    return f"{', '.join(sizes)} GiB of {totals[0][2]}, as `baton validate` estimates; not measured"


def with_twin(path: Path, folder: Path) -> Recipe:
    """Returns a recipe with its model, its rows and all that only a GPU can do replaced, everything else as it is.

    Args:
        path: The recipe.
        folder: With the twins below `twins`, as `needs` names them; for rows and the store.
    """
    document = load.read(str(path))
    for part in (document, *document.get("phases", ())):
        _shrink(part, folder)
    document |= {"store": {"uri": str(folder / "store")}, "tracking": {"mlflow": None}, "resources": {}}
    model = document["model"]
    model |= {"dtype": "float32"}
    model.pop("attention", None)
    if scratch := model.get("from_scratch"):
        scratch |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        scratch |= {"intermediate_size": 64, "vocab_size": None}
    for section in (model, model.get("tokenizer") or {}):
        if base := section.get("base"):
            section["base"] = str(folder / "twins" / base.replace("/", "--"))
    if str(model.get("chat_template")).endswith(".jinja"):
        model["chat_template"] = str(GALLERY / model["chat_template"])
    document.pop("sweep", None)
    return load.validate(document, origin=path.name)


def needs(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the models and tokenizers that a recipe names, each with the tokens that it gives a task there."""
    model = load.read(str(path))["model"]
    tokenizer = model.get("tokenizer") or {}
    marks = [tokenizer[name] for name in ("pad", "eos", "end_of_turn") if name in tokenizer]
    marks += ["<|im_start|>", "<|im_end|>"] if model.get("chat_template") == "chatml" else []
    for base in filter(None, (model.get("base"), tokenizer.get("base"))):
        yield base, tuple(marks)


def _shrink(part: Document, folder: Path) -> None:
    """Changes the sections of a recipe or a phase in place."""
    training, data = part.get("training"), part.get("data")
    if data is not None:
        length = 64 if data.get("packing") is True else 384
        for key in ("max_samples", "shuffle", "shards"):
            data.pop(key, None)
        data |= {"max_length": length, "workers": 1, "max_rejected": max(data.get("max_rejected", 0), 0.01)}
        if "source" in data:
            data["source"] = [_local(source, folder) for source in _listed(data["source"])]
        given = any(isinstance(source, dict) and source.get("side") == "eval" for source in data.get("source", ()))
        data["split"] = data.get("split", {}) if given else {**data.get("split", {}), "eval": 0.2}
    if training is not None:
        for key in ("epochs", "compile", "parallel"):
            training.pop(key, None)
        training |= {"max_steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "precision": "fp32", "threads": 1}
        training["warmup_steps"] = 1
        if training.get("lr_scheduler") == "warmup_stable_decay":
            training["lr_scheduler_options"] = {"num_decay_steps": 2}
        if grpo := training.get("grpo"):
            # Random weights hit no number: without a reward in which answers differ there would be nothing to learn.
            grpo["rewards"] = [*grpo["rewards"], "tests.resume.own:shortness"]
            grpo |= {"num_generations": 2, "max_completion_length": 6, "mask_truncated": False}
    if targets := (part.get("adapter") or {}).get("target_parameters"):
        part["adapter"]["target_parameters"] = [re.sub(r"^\d+\.", "1.", name) for name in targets[-2:]]
    part |= {"evaluation": {"samples": 0}, "chunks": {"wait_for_commit": True, "keep": {"last": 99}}}


def _listed(source: Any) -> list[Any]:
    return source if isinstance(source, list) else [source]


def _local(source: Any, folder: Path) -> Any:
    entry = {"uri": source} if isinstance(source, str) else dict(source)
    target = folder / "rows"
    target.mkdir(exist_ok=True)
    entry["uri"] = rows.write(entry["uri"], target, held_out=entry.get("side") == "eval")
    return entry
