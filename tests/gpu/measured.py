"""What the measurements train: a Llama of a size for this machine, and the recipes around it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from baton.data import readers
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from benchmarks.sizes import BYTES_PER_PARAMETER, SIZES
from tests.gpu import probe
from tests.gpu.conftest import HAS_GPU

SIZES_GB = "BATON_GPU_SIZES"
"""Environment variable: GB of the checkpoints that are saved and restored."""
CHUNKS = "BATON_GPU_CHUNKS"
"""Environment variable: killed chunks of a model of a published size, in place of 20."""
HELD = 1.5
"""Memory that training takes for a byte of checkpoint: gradients and activations on the GPU."""
COPIES = 3
"""Copies of a checkpoint that lie on disk or in memory at once: staged, stored, fetched."""


@dataclass(frozen=True)
class Scale:
    """How large things are here: a GPU's measure, or a CPU's half.

    Attributes:
        size: Name of the model's size in the benchmark.
        batch: Rows a step.
        length: Tokens a row.
        steps: Steps of a run.
    """

    size: str
    batch: int
    length: int
    steps: int


SCALE = Scale("214m", batch=8, length=1024, steps=30) if HAS_GPU else Scale("2m", batch=2, length=64, steps=6)


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A model of a known size with random weights, trained in one chunk and in many that are killed.

    Attributes:
        shape: As Llama's configuration has it.
        dtype: Type of the weights.
        batch: Rows a step.
        chunks: Chunks, of two steps each.
        training: More settings of `training`.
        adapter: Settings of an adapter, None for all weights.
    """

    shape: dict[str, Any]
    dtype: str = "float32"
    batch: int = 8
    chunks: int = 20
    training: dict[str, Any]
    adapter: dict[str, Any] | None = None


ADAPTER = {"type": "lora", "r": 16, "alpha": 32, "target_modules": "all-linear", "dropout": 0.05}


def sized() -> dict[str, Sized]:
    """Returns them by name; without a GPU tiny ones, in few chunks."""
    half = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    eight = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    half |= {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}
    eight |= {"intermediate_size": 14336, "vocab_size": 128256}
    chunks = int(os.environ.get(CHUNKS, "20"))
    if not HAS_GPU:
        chunks, tiny = 4, {"head_dim": 16, "intermediate_size": 64, "vocab_size": 512}
        tiny |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        half, eight = {**half, **tiny}, {**eight, **tiny}
    recomputed = {"gradient_checkpointing": True}
    return {
        "0.6 B, all weights": Sized(shape=half, chunks=chunks, training={}),
        "8 B, adapter": Sized(
            shape=eight, dtype="bfloat16", batch=4, chunks=chunks, training=recomputed, adapter=ADAPTER
        ),
    }


def shape(name: str, layers: int | None = None) -> dict[str, int]:
    """Returns a benchmark's model as Llama's configuration has it."""
    size = SIZES[name]
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": layers or size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.intermediate,
        "vocab_size": size.vocabulary,
    }


def sizes_gb() -> list[float]:
    """Returns the sizes of checkpoints that are asked for, or a few MB without a GPU."""
    if asked := os.environ.get(SIZES_GB):
        return [float(size) for size in asked.split(",")]
    return [1.0, 2.0, 4.0, 8.0] if HAS_GPU else [0.025]


def no_room(size_gb: float, store: Path) -> str:
    """Returns why a checkpoint of a size cannot be trained and kept here, empty where it can."""
    disk = psutil.disk_usage(str(store)).free + psutil.virtual_memory().available
    if COPIES * size_gb * 1e9 > disk:
        return f"{COPIES} copies of {size_gb:g} GB do not fit disk and memory"
    room = torch.cuda.mem_get_info()[0] if HAS_GPU else psutil.virtual_memory().available
    return f"training it takes {HELD * size_gb:g} GB" if HELD * size_gb * 1e9 > room else ""


def layers_for(size_gb: float) -> int:
    """Returns how many blocks a model has whose checkpoints have so many GB."""
    size = SIZES[SCALE.size]
    block = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate + 2 * size.hidden
    return max(1, round((size_gb * 1e9 / BYTES_PER_PARAMETER - 2 * size.vocabulary * size.hidden) / block))


class Runs:
    """Runs of one model, below a folder.

    Args:
        legs: The processes of the tests of exactness.
        folder: For models, rows and the store.
    """

    def __init__(self, legs: Any, folder: Path) -> None:
        self.legs, self.folder = legs, folder
        self.rows = str(folder / "rows.jsonl")
        with open(self.rows, "w", encoding="utf-8") as file:
            for number, row in enumerate(readers.stdlib_rows()):
                if number < 100 * SCALE.batch * SCALE.length // 64 + 500:
                    file.write(json.dumps({"text": f"{row['prompt']}\n{row['completion']}"}) + "\n")

    def base(self, name: str, size: dict[str, Any], dtype: str = "float32") -> str:
        """Returns the folder of a base model, made when it is first asked for."""
        folder = self.folder / f"base-{name}"
        if not (folder / "tokenizer.json").exists():  # saved last
            code, printed = self.legs.leg(probe.make_base, str(folder), self.rows, size, dtype)
            assert code == 0, printed
        return str(folder)

    def sized(self, name: str, chunks: int) -> Recipe:
        """Returns a recipe for a model of `sized`."""
        size = sized()[name]
        base = self.base(name.partition(",")[0].replace(" ", "-"), size.shape, size.dtype)
        whole = self.recipe(base=base, steps=2 * size.chunks, **{"batch_size": size.batch, **size.training})
        changes = {"model.dtype": size.dtype, "chunks.count": chunks}
        return load.with_values(whole, changes | ({"adapter": size.adapter} if size.adapter else {}))

    def recipe(
        self, *, layers: int | None = None, base: str | None = None, steps: int | None = None, **training: Any
    ) -> Recipe:
        """Returns a recipe for packed rows of text, in one chunk."""
        base = base or self.base(str(layers or "usual"), shape(SCALE.size, layers))
        document = {
            "name": "gpu",
            "seed": 1,
            "store": str(self.folder / "store"),
            "model": {"base": base},
            "data": {"source": self.rows, "max_length": SCALE.length, "packing": True, "split": {"eval": 0.05}},
            "training": {
                "method": "pretrain",
                "batch_size": SCALE.batch,
                "max_steps": steps or SCALE.steps,
                "learning_rate": 1e-3,
                "lr_scheduler": "constant",
                "precision": "bf16",
                "threads": 1,
                **training,
            },
            "chunks": {"wait_for_commit": True, "keep": {"last": 1, "best": 0}},
            "evaluation": {"samples": 0},
            "tracking": {"mlflow": None, "jsonl": True},
            "resources": {"gpus": int(HAS_GPU)},
        }
        return load.validate(document, origin="gpu")

    def chunk(self, run: Run, index: int = 1) -> dict[str, Any]:
        """Runs a chunk, and returns what its process did."""
        return self._watched(probe.chunk, run.uri, index)

    def plain(self, run: Run, *, deterministic: bool) -> dict[str, Any]:
        """Trains as a run does, by TRL alone, and returns what its process did."""
        return self._watched(probe.plain, run.uri, deterministic)

    def _watched(self, function: Any, *arguments: Any) -> dict[str, Any]:
        path = self.folder / "figures.json"
        code, printed = self.legs.leg(function, *arguments, str(path))
        assert code == 0, printed
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return figures
