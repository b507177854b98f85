"""`python -m tests.gpu`, as `make test-gpu` runs it: all tests here, and a table of what they found.

The matrix first, several cells at a time; then the measurements, alone on the machine. Arguments are passed on to
pytest. Without a GPU the tests' CPU halves run. `BATON_GPU_SIZES=1,2` says how many GB checkpoints have that are saved
and restored, in place of 1, 2, 4 and 8 as far as memory allows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.runs.versions import library_versions
from tests.gpu.cells import PIP
from tests.gpu.conftest import HAS_GPU, ROWS

JSON = Path("build/gpu.json")
PARTS = {"matrix": "tests/gpu/test_cuda_matrix.py", "measurements": "tests/gpu/test_measures.py"}
STYLES = {"passed": "green", "failed": "red", "error": "red", "skipped": "yellow"}


def main(arguments: list[str]) -> int:
    """Runs the tests, prints the table and returns pytest's exit code."""
    code, parts = 0, {}
    for name, file in PARTS.items():
        with tempfile.TemporaryDirectory(prefix="baton-gpu-") as folder:
            rows = Path(folder) / "rows.jsonl"
            command = pytest_command([file, *arguments], apart=name != "matrix")
            ended = subprocess.run(command, env={**os.environ, ROWS: str(rows)}, check=False).returncode
            parts[name] = read_rows(rows)
        code = code or (ended if ended != 5 else 0)  # 5: `-k` left nothing of this file
    document = {**machine(), "parts": parts}
    JSON.parent.mkdir(exist_ok=True)
    JSON.write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    show(document)
    print(f"figures: {JSON}")
    return code


def pytest_command(arguments: Sequence[str], *, apart: bool) -> list[str]:
    """Returns the command that runs tests, `apart` on a machine of their own, else several at a time."""
    workers = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    several = ["-n", str(workers), "--dist", "worksteal"]
    spread = ["-p", "no:xdist"] if apart or workers == 1 else several
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", *spread, *arguments]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the tests that have ended, each with the outcome of its last run."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return list({row["node"]: row for row in map(json.loads, lines)}.values())


def machine() -> dict[str, Any]:
    packages = {pip: importlib.util.find_spec(name) is not None for name, pip in PIP.items()}
    if not HAS_GPU:
        return {"device": "no CUDA device: CPU halves", "versions": library_versions(), "packages": packages}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
        "versions": library_versions(),
        "packages": packages,
    }


def show(document: Mapping[str, Any]) -> None:
    """Prints a table for each part."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    for name, rows in document["parts"].items():
        table = Table(title=f"{name}: {document['device']}", title_justify="left")
        for column in ("test", "", "what", "found", "goal"):
            table.add_column(column, overflow="fold")
        for row in sorted(rows, key=lambda each: each["name"]):
            table.add_row(escape(row["name"]), *_first(row))
            for figure in row["figures"][1:]:
                table.add_row("", "", *map(escape, figure))
        console.print(table)
    counts = dict.fromkeys(STYLES, 0)
    for rows in document["parts"].values():
        for row in rows:
            counts[row["outcome"]] += 1
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))


def _first(row: dict[str, Any]) -> list[str]:
    style = STYLES[row["outcome"]]
    what, found, goal = row["figures"][0] if row["figures"] else ("", "", "")
    if row["outcome"] != "passed":
        what, found, goal = row["why"], "", ""
    return [f"[{style}]{row['outcome']}[/{style}]", *map(escape, (what, found, goal))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
