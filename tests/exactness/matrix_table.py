"""The matrix as a page: `python -m tests.exactness.matrix_table docs/internals/matrix.md` (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.exactness import matrix_budget, matrix_turns, matrix_virtual
from tests.exactness.matrix import METHODS, Cell, cells
from tests.support import passes

INTRODUCTION = """\
# Tested combinations

<!-- Written by `make docs`: cells of tests/exactness/matrix.py, commits of tests/passes.json. -->

Each cell is a recipe of 19 steps and at least two epochs. The test trains it once without a stop, and once in four
processes with random ends, each resuming from the previous checkpoint. Logged losses and every part of the state must
be equal, byte for byte. [Negative controls](controls.md) show that each part of the state matters.

● runs in `make test`, ○ in `make test-all`; the commit of the last pass follows ([all tests, with dates](passes.md)).
Weights are in brackets. CPU and float32, unless the feature names something else.

- DDP ×2 and FSDP ×2: two processes train together, for 12 steps, on both sides.
- Virtual workers: four (or the number in the row), shared by one, two and four processes that change between chunks
  (1→4→2), for 8 steps, against one process. Plain cells also run in one chunk of two and four, and as 4→1→2. Other
  traces of the number of processes are in `test_virtual.py` and, for generating methods, `test_virtual_writes.py`.
- Shared process: trials of two seeds take turns inside one process, killed twice, against each recipe alone.
- Budget: a run that ends with its budget, or goes on with another, against the run that was told its length.

"""

NOT_HERE = """
## Not in the matrix

| combination | reason |
|---|---|
| TF32, Liger, paged memory, kinds of attention | need a CUDA GPU: see below |
| FlashAttention's own package | no GPU has run it yet |
| fp16 with its gradient scaler | `test_scaler.py` gives Accelerate torch's scaler for CPUs; GPUs: see below |
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

[Evidence from a GPU](gpu-evidence.md) is of the first one, an H200 for fifteen minutes. 39 of 44 cells ended on equal
bits, among them seven methods in full precision, in bfloat16 with dropout and in fp16. Five failed:

| cell | cause | since then |
|---|---|---|
| three paged optimizers | a file keeps the mark of paged memory: loaded state was not paged | mended, tested on CPUs |
| `compile` | the compiler times kernels and takes the fastest | its deterministic mode is on |
| `compile: max-autotune` | a CUDA graph was not recorded; reason not found | use `compile: true` |

`ademamix_8bit` failed before that: bitsandbytes' kernel shares a scale between two averages of a weight without whole
blocks of 256. Baton keeps such weights' averages in 32 bits. No GPU has run the mended code yet. Models of 0.6 B and
8 B, memory and twenty kills have had no GPU either.

Install CUDA's torch with `make setup`, and for the skipped cells the extra `gpu` and flash-attn: `.venv/bin/pip install
liger-kernel==0.8.5 nvidia-ml-py==13.615.71`. `make test-gpu ARGS="-k nf4"` narrows it. Without a device the same tests
run their CPU part.
"""


def markdown(record: passes.Record) -> str:
    """Returns the page, with the last passes of a record."""
    features: dict[str, dict[str, str]] = {}
    for test, cell in (*_tests(), *_turns(), *matrix_budget.tests()):
        commit = record.get(test, {}).get("commit", "")[:7]
        features.setdefault(shown(cell), {})[cell.method] = f"{'●' if cell.quick else '○'} {commit}".strip()
    head = f"| feature | {' | '.join(METHODS)} |\n|---|{':-:|' * len(METHODS)}\n"
    rows = [
        f"| {feature} | {' | '.join(found.get(method, '') for method in METHODS)} |"
        for feature, found in features.items()
    ]
    count = sum(len(found) for found in features.values())
    return f"{INTRODUCTION}{head}" + "\n".join(rows) + f"\n\n{count} cells.\n{NOT_HERE}{ON_A_GPU}"


def _tests() -> Iterator[tuple[str, Cell]]:
    """Yields each cell's test and the cell."""
    folder = "tests/exactness"
    for cell in cells():
        yield f"{folder}/test_matrix.py::test_chunks_end_on_the_bits_of_one_run[{cell.name}]", cell
    for cell in matrix_virtual.cells():
        yield f"{folder}/test_virtual_methods.py::test_the_number_of_processes_leaves_no_trace[{cell.name}]", cell
    for name, cell in zip(matrix_virtual.WRITING, matrix_virtual.writing(), strict=True):
        yield f"{folder}/test_virtual_writes.py::test_every_method_that_writes_ends_on_the_same_bits[{name}]", cell


def _turns() -> Iterator[tuple[str, Cell]]:
    for cell in matrix_turns.cells():
        yield f"tests/exactness/test_turns.py::test_each_trial_ends_on_the_bits_of_its_recipe_alone[{cell.name}]", cell


def all_cells() -> Iterator[Cell]:
    """Yields the cells of both tables."""
    return (cell for _, cell in _tests())


def shown(cell: Cell) -> str:
    """Returns a cell's feature as people write it, its weights in brackets."""
    feature = cell.feature
    for name in ("ddp", "fsdp"):
        feature = feature.replace(f"{name} x2", f"{name.upper()} ×2")
    return feature if cell.weights == "full" else f"{feature} ({cell.weights})"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(passes.load()), encoding="utf-8")
