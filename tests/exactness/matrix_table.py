"""The matrix as a page: `python -m tests.exactness.matrix_table docs/internals/matrix.md` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.exactness import matrix_virtual
from tests.exactness.matrix import METHODS, Cell, cells

INTRODUCTION = """\
# Tested combinations

<!-- Written by `make docs` from tests/exactness/matrix.py; edit that file instead. -->

Each cell is a recipe of 19 steps and at least two epochs. The test trains it once without a stop, and once in four
processes with random ends, each resuming from the previous checkpoint. Logged losses and every part of the state must
be equal, byte for byte. [Negative controls](controls.md) show that each part of the state matters.

● runs in `make test`, ○ in `make test-all`. Weights are in brackets. CPU and float32, unless the feature names
something else.

- DDP ×2 and FSDP ×2: two processes train together, for 12 steps, on both sides.
- Virtual workers: four (or the number in the row), shared by one, two and four processes that change between chunks
  (1→4→2), for 8 steps, against one process. Plain cells also run in one chunk of two and four, and as 4→1→2. Other
  traces of the number of processes are in `test_virtual.py` and, for generating methods, `test_virtual_writes.py`.

"""

NOT_HERE = """
## Not in the matrix

| combination | reason |
|---|---|
| TF32, flash attention, Liger, paged memory | need a CUDA GPU: see below, no GPU has run them yet |
| fp16 with its gradient scaler | `test_scaler.py` gives Accelerate torch's scaler for CPUs; no GPU has run it yet |
| kills, forks and exports of weights in few bits | `test_few_bits.py`, for every method; on CPUs |
| streaming data | rows are tokenized once and read by position: no stream state exists |
| persistent workers | not offered: workers start again with each epoch |
| more processes, more machines | equal code for any number; `test_parallel.py` has four processes |
| several GPUs | DDP ×2 and FSDP ×2 run on CPUs with gloo; NCCL has not been tried |
"""

ON_A_GPU = """
## On a GPU

`make test-gpu` on a machine with a CUDA device runs the cells that need one, each with its negative control: half
precision with its scaler, TF32, weights in 4 and 8 bits, 8-bit and paged optimizers, compiling, kinds of attention,
Liger's kernels, recomputed and offloaded activations. It also measures step time and memory next to plain TRL (losses
must be equal bits), the cost of determinism, MFU, GPU utilisation, the result of `micro_batch_size: auto`, saving and
restoring checkpoints of 1, 2, 4 and 8 GB (`BATON_GPU_SIZES=1,16` for others), and the memory of a resumed chunk, which
must not exceed that of an uninterrupted one. Times have no bound. The result is a table and `build/gpu.json`.

`make gpu-evidence` runs all of it in parts of at most nine minutes, as well as checkpoints next to a training GPU, and
models of 0.6 B and 8 B parameters with random weights: one chunk against twenty killed ones. A stopped call is resumed
by the next. The result is a page and a JSON in `build/gpu-evidence`; `ARGS=--publish` writes both into the docs. It
fetches nothing: for a machine with torch and no network, `make gpu-wheels` prepares `build/gpu-wheels` (below 60 MiB)
elsewhere. `ARGS=--dry` tries it on a CPU with tiny models.

Install CUDA's torch with `make setup`, and for the skipped cells the extra `gpu` and flash-attn: `.venv/bin/pip install
liger-kernel==0.8.5 nvidia-ml-py==13.615.71`. `make test-gpu ARGS="-k nf4"` narrows it. Without a device the same tests
run their CPU part.
"""


def markdown() -> str:
    """Returns the page."""
    features: dict[str, dict[str, Cell]] = {}
    for cell in all_cells():
        features.setdefault(shown(cell), {})[cell.method] = cell
    head = f"| feature | {' | '.join(METHODS)} |\n|---|{':-:|' * len(METHODS)}\n"
    rows = [
        f"| {feature} | {' | '.join(_mark(found.get(method)) for method in METHODS)} |"
        for feature, found in features.items()
    ]
    count = sum(len(found) for found in features.values())
    return f"{INTRODUCTION}{head}" + "\n".join(rows) + f"\n\n{count} cells.\n{NOT_HERE}{ON_A_GPU}"


def all_cells() -> Iterator[Cell]:
    """Yields the cells of both tables."""
    yield from cells()
    yield from matrix_virtual.cells()
    yield from matrix_virtual.writing()


def shown(cell: Cell) -> str:
    """Returns a cell's feature as people write it, its weights in brackets."""
    feature = cell.feature
    for name in ("ddp", "fsdp"):
        feature = feature.replace(f"{name} x2", f"{name.upper()} ×2")
    return feature if cell.weights == "full" else f"{feature} ({cell.weights})"


def _mark(cell: Cell | None) -> str:
    return "" if cell is None else "●" if cell.quick else "○"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
