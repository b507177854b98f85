"""Which files are mutated, which tests look at them, and which mutants are drawn."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tools.mutation import operators
from tools.mutation.operators import Mutant

ROOT = Path(__file__).resolve().parents[2]

_UNIT = "tests/train"
FILES = (
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "baton/checkpoint").glob("[a-z]*.py"))),
    *(
        f"baton/train/{name}.py"
        for name in (
            "attempt",
            "checkpointer",
            "fork",
            "reshard",
            "samplers",
            "sharding",
            "state",
            "tokens",
            "trainer",
            "user_state",
        )
    ),
    *(f"baton/store/{name}.py" for name in ("bundle", "manifest", "storage")),
    *(f"baton/{name}.py" for name in ("models/rng", "runs/versions")),
)
"""The code that saves and restores."""

TESTS = (
    "tests/models/test_generation.py",
    "tests/models/test_rng.py",
    "tests/store/test_bundles.py",
    "tests/store/test_cache.py",
    "tests/store/test_lease.py",
    "tests/store/test_storage.py",
    "tests/test_queries.py",
    "tests/threats/test_bucket_owner.py",
    "tests/threats/test_neighbour.py",
    "tests/tools/test_schedules_found.py",
    "tests/goldens/test_hashed_documents.py",
    "tests/runs/test_formats.py",
    "tests/checkpoint",
    "tests/end_to_end/test_seals.py",
    "tests/models/test_exported_base.py",
    "tests/test_fork_rules.py",
    "tests/pages/test_collect.py",
    "tests/train/attach",
    "tests/train/checkpointing",
    "tests/train/data",
    "tests/train/distributed/test_watchdog.py",
    "tests/train/trainer/test_guard.py",
    "tests/train/trainer/test_joining.py",
    "tests/train/trainer/test_partitions.py",
    "tests/train/trainer/test_resumable.py",
    "tests/train/trainer/test_settling.py",
    "tests/train/trainer/test_sharding.py",
    "tests/train/trainer/test_takeover.py",
    "tests/train/trainer/test_zero_engine.py",
    "tests/train/trainer/test_zero_parts.py",
    "tests/exactness/test_best.py",
    "tests/exactness/test_fork.py",
    "tests/exactness/test_guards.py",
    "tests/exactness/test_parallel.py",
    "tests/exactness/test_parallel_sizes.py",
)
"""Tests that may see a mutant, all but slow ones: what they run, they run in forks of their process, or in it."""
SLOW = ("tests/exactness/test_parallel.py::test_chunks_end_on_the_bits_of_one_run[fsdp]",)
"""Slow tests beside them, for what no other runs."""
OF_DEEPSPEED = (
    "tests/exactness/test_zero.py::test_chunks_end_on_the_bits_of_one_run",
    "tests/exactness/test_zero_sizes.py::test_processes_become_more_fewer_and_one[uneven-zero2]",
    "tests/exactness/test_zero_sizes.py::test_processes_become_more_fewer_and_one[uneven-zero3]",
)
"""Those that need DeepSpeed, where it is on the path: `PYTHONPATH=build/deepspeed`, see `make test-deepspeed`."""
OF_DECLARATIONS = {
    "baton/checkpoint/store.py": tuple(f"tests/checkpoint/test_{name}.py" for name in ("usable", "proof")),
    "baton/runs/documents.py": (f"{_UNIT}/checkpointing/test_state.py", f"{_UNIT}/checkpointing/test_chunks.py"),
    "baton/runs/versions.py": ("tests/checkpoint/test_fingerprints.py", "tests/runs/test_formats.py"),
}
"""File with declarations, which run as it is imported and never again → their tests, by how their names begin."""
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def tests() -> tuple[str, ...]:
    """Returns the files of tests, and single tests, that can be run here."""
    return TESTS + SLOW + (OF_DEEPSPEED if HAS_DEEPSPEED else ())


def is_runnable(test: str) -> bool:
    """Tells whether a test can be run here."""
    return HAS_DEEPSPEED or not test.startswith(OF_DEEPSPEED)


def all_mutants(files: Sequence[str] = FILES) -> list[Mutant]:
    """Returns every mutant of some files."""
    return [mutant for path in files for mutant in operators.mutants(path, (ROOT / path).read_bytes())]


def drawn(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """Returns some of the mutants, from each file about its share, in an order that follows from their names.

    A change somewhere else in the code leaves the draw of a function's mutants as it is.
    """
    of_file: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=lambda each: hashlib.sha256(f"{seed} {each.key}".encode()).digest()):
        of_file.setdefault(mutant.path, []).append(mutant)
    chosen: list[Mutant] = []
    for path in sorted(of_file):
        share = -(-number * len(of_file[path]) // len(mutants))
        chosen += of_file[path][: max(share, min(2, number))]
    return chosen
