"""A stage as a process: `python -m tools.chaos.stage NAME RUN_URI [INDEX] --memory … --disk … --rows FILE`.

It is Baton's own code on a machine of its own: small folders stand for `/dev/shm` and the temporary folder, and the
rows of each step are noted in a file before the step is made.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from baton import events


def train_chunk(run_uri: str, index: int) -> None:
    from baton.train.chunk import run_chunk

    run_chunk(run_uri, index)


def checkpoint(run_uri: str, index: int) -> None:
    from baton.checkpoint.proof import promote
    from baton.runs.run import Run

    promote(Run.open(run_uri), index)


def evaluate(run_uri: str, _index: int) -> None:
    from baton.evaluate.evaluate import evaluate_run

    evaluate_run(run_uri)


def export(run_uri: str, _index: int) -> None:
    from baton.export.export import export_run

    export_run(run_uri)


def base(folder: str, _index: int) -> None:
    """Makes the base model that recipes adapt."""
    from tests.exactness import legs

    legs.make_base(folder)


STAGES = {stage.__name__: stage for stage in (train_chunk, checkpoint, evaluate, export, base)}


def note_rows(path: str) -> None:
    """Has each micro-batch noted as `PID STEP ROWS SHA-256`, in one write, before it is trained on."""
    import transformers

    trained = transformers.Trainer.training_step
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def training_step(self: Any, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        count, digest = _digest(inputs)
        os.write(file, f"{os.getpid()} {self.state.global_step + 1} {count} {digest}\n".encode())
        return trained(self, model, inputs, *arguments, **options)

    transformers.Trainer.training_step = training_step


def _digest(inputs: Any) -> tuple[int, str]:
    import torch

    digest, count = hashlib.sha256(), 0
    parts: Sequence[tuple[Any, Any]] = list(inputs.items()) if isinstance(inputs, Mapping) else list(enumerate(inputs))
    for name, value in sorted(parts, key=lambda part: str(part[0])):
        digest.update(str(name).encode())
        if isinstance(value, torch.Tensor):
            count = max(count, len(value) if value.ndim else 0)
            digest.update(repr((value.dtype, tuple(value.shape), value.tolist())).encode())
        else:
            digest.update(repr(value).encode())
    return (count if isinstance(inputs, Mapping) else len(parts)), digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=STAGES)
    parser.add_argument("uri")
    parser.add_argument("index", type=int, nargs="?", default=0)
    parser.add_argument("--memory")
    parser.add_argument("--disk")
    parser.add_argument("--rows")
    given = parser.parse_args()
    tempfile.tempdir = given.disk
    with events.stage(f"{given.name} {given.index}"):
        if given.memory:
            staging = importlib.import_module("baton.checkpoint.staging")
            staging.MEMORY = given.memory  # type: ignore[attr-defined]
        if given.rows and given.name == "train_chunk":
            note_rows(given.rows)
        STAGES[given.name](given.uri, given.index)


if __name__ == "__main__":
    main()
