"""Two optimizer steps of an imported example, by the real stages in this process, on a CPU with a tiny twin."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from pathlib import Path
from typing import Any

from baton.data.split import split_data
from baton.data.tokenize import tokenize_run
from baton.recipe import load
from baton.recipe.methods import SPECS
from baton.train.chunk import run_chunk
from tests.importers.measuring import twins

Document = dict[str, Any]

STEPS = 2
PACKED, WHOLE = 512, 2048
"""Tokens of a sequence, beside what the template begins with: of several rows, and of one."""
MACHINE = {
    "model": ("quantization", "attention", "revision", "trust_remote_code"),
    "training": ("compile", "compile_optimizer", "liger", "parallel", "activation_offloading", "epochs",
                 "early_stopping", "fp16_initial_scale", "trainable", "micro_batch_size"),
    "adapter": ("layers_to_transform",),
    "evaluation": ("every", "per_epoch", "sample_every", "tasks", "metrics", "batch_size"),
    "export": ("hub", "checkpoint"),
    "hooks": ("source",),
}  # fmt: skip
"""What is overridden, by section: what needs a GPU or a network, names layers that a twin does not have, or says how
long a real run takes."""

JUDGES = "def {name}(completions, **columns):\n    return [float(len(str(text))) for text in completions]\n\n"


WRAPPER = "language_model."
"""Part of the names of layers in a model that sees, which a twin lacks: it is the part that reads."""


def shrunk(document: Document, base: str, folder: Path, twin: Path) -> Document:
    """Returns a recipe for the twin: two small steps on a CPU, everything else as imported."""
    for section, names in MACHINE.items():
        for name in names:
            document.get(section, {}).pop(name, None)
    model, training, data = document["model"], document["training"], document["data"]
    if re.search("bnb|8bit|4bit|paged", training.get("optimizer", "")):
        training |= {"optimizer": "adamw_torch", "optimizer_options": {}}
    model |= {"base": str(twin), "dtype": "float32"}
    if (model.get("tokenizer") or {}).get("base"):
        model["tokenizer"]["base"] = str(twin)
    target = document.get("adapter", {}).get("target_modules")
    if isinstance(target, str):
        document["adapter"]["target_modules"] = target.replace(WRAPPER, "")
    if twins.RECURRENT.match(twins.architecture(base)):
        data.pop("packing", None)
    size, length = 2, PACKED if data.get("packing") else WHOLE
    if training["method"] in ("grpo", "rloo"):
        section = training.setdefault(training["method"], {})
        section |= {"num_generations": 2, "max_completion_length": 8}
        document["hooks"] = {"source": str(_judges(section, folder))}
    training |= {"batch_size": size, "max_steps": STEPS, "precision": "fp32", "log_every": 1, "workers": 0}
    training.pop("tf32", None)
    if SPECS[training["method"]].micro_batch_decides_loss:
        training["micro_batch_size"] = size
    data |= {"max_length": length + twins.head_length(base), "split": {"eval": 0.2}, "workers": 1}
    document |= {"store": str(folder / "store"), "chunks": {"count": 1}, "tracking": {"mlflow": None}}
    document["resources"] = {"profile": "cpu"}
    return {name: section for name, section in document.items() if section != {}}


def _judges(section: Document, folder: Path) -> Path:
    names = {reward["use"].rpartition(":")[2] for reward in section.get("rewards", [])}
    file = folder / "judges.py"
    file.write_text("".join(JUDGES.format(name=name) for name in sorted(names)), encoding="utf-8")
    for reward in section.get("rewards", []):
        reward["use"] = f"judges:{reward['use'].rpartition(':')[2]}"
    return file


def take(document: Document, base: str, marks: tuple[str, ...], folder: Path, kept: Path) -> str:
    """Takes two steps, and returns why that is not possible, empty where it is.

    Args:
        document: The imported recipe.
        base: Name of the example's model.
        marks: Tokens that the example says the model has.
        folder: For rows and the store.
        kept: Where twins stay for other examples.
    """
    scores = SPECS[document["training"]["method"]].scores
    twin = twins.make(base, kept, marks, scores=scores)
    if twin is None:
        return "the model's code is in its repository"
    recipe = load.validate(shrunk(document, base, folder, twin), origin="the example")
    with _quiet():
        split = split_data(recipe, "measured")
        tokenize_run(split["run_uri"])
        outcome = run_chunk(split["run_uri"], 1)
    assert outcome is not None
    return "" if outcome.step == STEPS else f"it ended at step {outcome.step}"


@contextlib.contextmanager
def _quiet() -> Any:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
