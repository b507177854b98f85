"""The matrix as a page: `python -m tests.resume.matrix_table docs/matrix.md` (`make docs`)."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.resume.matrix import METHODS, Cell, cells

INTRODUCTION = """\
# The exactness matrix

<!-- Written by `make docs` from tests/resume/matrix.py; edit that file instead. -->

Each cell is a recipe of 19 steps, two epochs or more. The test trains it once in one process that is never stopped, and
once in four processes whose ends are drawn at random, each restoring what the one before left; logged losses and every
part of the state (weights, optimizer, scheduler, random state, position, callbacks, log, what the method keeps) must be
the same, byte for byte.
● is part of `make test`, with a negative control: a part of the state is left out, and the comparison must fail.
○ is part of `make test-all`. Weights in brackets. All on the CPU, in float32 unless the feature says otherwise.
DDP ×2 and FSDP ×2 are two processes that train together, for 12 steps: the chunk that is never stopped has two, and so
has each of the four. These cells have negative controls too.

"""

NOT_HERE = """
## Not in the matrix

| what | why |
|---|---|
| QLoRA, 8-bit and paged optimizers, TF32 | need a CUDA GPU: `tests/gpu/` has their cells, and no GPU has run them yet |
| fp16 with its gradient scaler | the same; the scaler's state is saved, restored and compared |
| Liger, flash attention | need a CUDA GPU and packages of their own; no cells yet |
| streaming data | rows are tokenized once and read by position: there is no stream whose state could be lost |
| persistent workers | not offered: workers begin anew with each epoch |
| more processes, more machines | put together in the same way for any number; `test_parallel.py` has four processes |
| several GPUs | DDP ×2 and FSDP ×2 are processes on CPUs, joined by gloo; NCCL on GPUs has not been tried |
"""


def markdown() -> str:
    """Returns the page."""
    features: dict[str, dict[str, Cell]] = {}
    for cell in cells():
        weights = "" if cell.weights == "full" else f" ({cell.weights})"
        features.setdefault(cell.feature + weights, {})[cell.method] = cell
    head = f"| feature | {' | '.join(METHODS)} |\n|---|{':-:|' * len(METHODS)}\n"
    rows = [
        f"| {_shown(feature)} | {' | '.join(_mark(found.get(method)) for method in METHODS)} |"
        for feature, found in features.items()
    ]
    count = sum(len(found) for found in features.values())
    return f"{INTRODUCTION}{head}" + "\n".join(rows) + f"\n\n{count} cells.\n{NOT_HERE}"


def _shown(feature: str) -> str:
    """Returns a feature's name as people write it."""
    for name in ("ddp", "fsdp"):
        feature = feature.replace(f"{name} x2", f"{name.upper()} ×2")
    return feature


def _mark(cell: Cell | None) -> str:
    return "" if cell is None else "●" if cell.quick else "○"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
