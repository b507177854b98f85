"""The matrix as a page: `python -m tests.exactness.matrix_table docs/internals/matrix.md` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.exactness import matrix_virtual
from tests.exactness.matrix import METHODS, Cell, cells

INTRODUCTION = """\
# The exactness matrix

<!-- Written by `make docs` from tests/exactness/matrix.py; edit that file instead. -->

Each cell is a recipe of 19 steps, two epochs or more. The test trains it once in one process that is never stopped, and
once in four processes whose ends are drawn at random, each restoring what the one before left; logged losses and every
part of the state (weights, optimizer, scheduler, random state, position, callbacks, log, what the method keeps) must be
the same, byte for byte.
● is part of `make test`, ○ of `make test-all`. Weights in brackets. All on the CPU, in float32 unless the feature says
otherwise.
DDP ×2 and FSDP ×2 are two processes that train together, for 12 steps: the chunk that is never stopped has two, and so
has each of the four.
Virtual workers are four (or as many as the row says) that one, two and four processes share, changing from
chunk to chunk (1→4→2), for 8 steps, where the chunk that is never stopped has one; plain cells also in one chunk of two
and four, and as 4→1→2. What else would leave a trace of the number of processes is in `test_virtual.py`, and for
methods that write what they learn from in `test_virtual_writes.py`.
That each part of the state matters is shown for each cell: [negative controls](controls.md).

"""

NOT_HERE = """
## Not in the matrix

| what | why |
|---|---|
| fp16 with its gradient scaler, TF32, flash attention, Liger | need a CUDA GPU: see below, no GPU has run them yet |
| QLoRA, 8-bit and paged optimizers | the same; bitsandbytes' code for CPUs has run all but paging |
| streaming data | rows are tokenized once and read by position: there is no stream whose state could be lost |
| persistent workers | not offered: workers begin anew with each epoch |
| more processes, more machines | put together in the same way for any number; `test_parallel.py` has four processes |
| several GPUs | DDP ×2 and FSDP ×2 are processes on CPUs, joined by gloo; NCCL on GPUs has not been tried |
"""

ON_A_GPU = """
## On a GPU

`make test-gpu` on a machine with a CUDA device runs the cells that need one, each with its negative control: half
precision with its scaler, TF32, weights in 4 and 8 bits, 8-bit and paged optimizers, compiling, kinds of attention,
Liger's kernels, recomputed and offloaded activations. Then it measures, alone on the machine: step time and memory
beside plain TRL, whose losses must be the same bits, what determinism costs, MFU, how busy the GPU is, what
`micro_batch_size: auto` finds, saving and restoring checkpoints of 1, 2, 4 and 8 GB as far as memory allows
(`BATON_GPU_SIZES=1,16` for others), and the memory of a resumed chunk, which must not be above that of one that is
never stopped. Times are told and not judged. It ends with a table, and writes `build/gpu.json`.

It needs what `make setup` installs, whose torch is a CUDA build on Linux. What asks for more is skipped, and the table
says so: `.venv/bin/pip install bitsandbytes==0.50.2 liger-kernel==0.8.5 nvidia-ml-py==13.615.71` (the extra `gpu`), and
flash-attn. `make test-gpu ARGS="-k nf4"` narrows it. Without a device the same tests run what a CPU can show of them.
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
