"""`make gpu-evidence`: a GPU's tests and measurements in parts of at most nine minutes, as one page and one JSON.

    python -m tests.gpu.evidence [--minutes 40] [--only PART] [--folder FOLDER] [--dry] [--publish]

A part that is stopped goes on in the next call: tests that have passed are not run again. Nothing is fetched; packages
come from the folder of `python -m tests.gpu.wheels`. `--dry` does all of it on a CPU with tiny models. `--publish`
writes the page and the JSON of an earlier call into the docs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import wheels

FOLDER = wheels.ROOT / "build" / "gpu-evidence"
DOCS = wheels.ROOT / "docs" / "internals"
NAME = "gpu-evidence"
PART_SECONDS = 9 * 60
LEAST_SECONDS = 60
"""Time left below which no part is begun."""
MATRIX, MEASURES, SIZED = (f"tests/gpu/test_{name}.py" for name in ("cuda_matrix", "measures", "sized"))
# tests/conftest.py imports kfp, which that machine lacks.
ARGUMENTS = ("-p", "no:cacheprovider", "--override-ini", "minversion=7", "--confcutdir", "tests/gpu")


@dataclass(frozen=True)
class Part:
    """Tests that run together.

    Attributes:
        title: Heading on the page.
        tests: What pytest is given.
        apart: Whether they need the machine for themselves.
    """

    title: str
    tests: tuple[str, ...]
    apart: bool = True


def parts() -> Iterator[Part]:
    """Yields them, the cheapest first."""
    from tests.gpu import cells, measured

    for name, group in cells.GROUPS.items():
        nodes = [f"{MATRIX}::test_chunks_end_on_the_bits_of_one_run[{each.cell.name}]" for each in group()]
        more = (f"{MATRIX}::test_attention_gives_the_same_gradients_each_time",) if name == "attention" else ()
        yield Part(f"matrix, {name}", (*nodes, *more), apart=False)
    yield Part("determinism on and off", (f"{MEASURES}::test_beside_plain_trl_and_what_determinism_costs",))
    yield Part(
        "checkpoints beside training",
        (f"{MEASURES}::test_checkpoints_beside_training", f"{MEASURES}::test_save_and_restore"),
    )
    fits = ("test_a_resumed_chunk_needs_no_more_memory", "test_a_micro_batch_is_found_that_fits")
    yield Part("memory", tuple(f"{MEASURES}::{name}" for name in fits))
    for name in measured.sized():
        yield Part(name, (f"{SIZED}::test_killed_chunks_end_on_the_bits_of_one_run[{name}]",))


def main() -> int:
    given = _parser().parse_args()
    if given.publish:
        publish(given.folder)
        return 0
    _with_packages(given.wheels)
    from tests.gpu.conftest import HAS_GPU

    if given.dry == HAS_GPU:
        sys.exit("make gpu-evidence: " + ("--dry is for machines without a GPU." if given.dry else "no CUDA; --dry?"))
    given.folder.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts() if not given.only or part.title in given.only]
    if not chosen:
        sys.exit(f"make gpu-evidence: --only takes {', '.join(repr(part.title) for part in parts())}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests end, too
    until, code = time.monotonic() + 60 * given.minutes, 0
    for part in chosen:
        left = until - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{part.title}: not begun, {left:.0f} s left; run again to go on", flush=True)
            code = code or 3
            continue
        try:
            code = run(part, given.folder, min(left, PART_SECONDS)) or code
        finally:
            write(given.folder, is_dry=given.dry)
    print(f"{given.folder}/{NAME}.md, {NAME}.json")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make gpu-evidence", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--minutes", type=float, default=40, help="time for this call (%(default)g)")
    parser.add_argument("--only", action="append", metavar="PART", help="this part; may be repeated")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="rows, runs, page and JSON (%(default)s)")
    parser.add_argument("--wheels", type=Path, default=wheels.FOLDER, help="packages to install (%(default)s)")
    parser.add_argument("--publish", action="store_true", help="write an earlier call's page and JSON into the docs")
    return parser


def _with_packages(folder: Path) -> None:
    """Starts this program again with the packages that this interpreter lacks."""
    needed = ("obstore", "pydantic", "trl", "datasets")
    if all(importlib.util.find_spec(name) for name in needed):
        return
    installed = {each.name.lower().replace("_", "-") for each in importlib.metadata.distributions()}
    if missing := sorted(set(wheels.THERE) - installed):
        sys.exit(f"make gpu-evidence: this Python lacks {', '.join(missing)}, which no wheel brings.")
    site = str(wheels.install(folder))
    if site in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        sys.exit(f"make gpu-evidence: {site} lacks some of {', '.join(needed)}; remove it and run again.")
    paths = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], os.environ | {"PYTHONPATH": paths})


def run(part: Part, folder: Path, seconds: float) -> int:
    """Runs what a part has left, for so long, and returns 0, or pytest's exit code, or 3 where time was too short."""
    from tests.gpu.__main__ import pytest_command, read_rows
    from tests.gpu.conftest import FOLDER as RUNS
    from tests.gpu.conftest import ROWS

    rows = rows_of(part, folder)
    done = [row["node"] for row in read_rows(rows) if row["outcome"] in ("passed", "skipped")]
    arguments = [*ARGUMENTS, *part.tests, *(word for node in done for word in ("--deselect", node))]
    print(f"{part.title}: {len(done)} tests done before, {seconds / 60:.0f} min at most", flush=True)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    began = time.monotonic()
    process = subprocess.Popen(
        pytest_command(arguments, apart=part.apart),
        cwd=wheels.ROOT,
        env={**outside, ROWS: str(rows.resolve()), RUNS: str((folder / "runs").resolve())},
        start_new_session=True,
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = 3
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with open(rows.with_suffix(".seconds"), "a", encoding="utf-8") as file:
        file.write(f"{time.monotonic() - began:.1f}\n")
    return 0 if code == 5 else code  # 5: nothing was left to run


def rows_of(part: Part, folder: Path) -> Path:
    """Returns the file with a part's tests."""
    return folder / f"{part.title.replace(',', '').replace(' ', '-')}.jsonl"


def write(folder: Path, *, is_dry: bool) -> None:
    """Writes the page and the JSON of all parts so far."""
    from tests.gpu.__main__ import machine, read_rows

    found = {}
    for part in parts():
        rows = rows_of(part, folder)
        times = rows.with_suffix(".seconds")
        seconds = sum(map(float, times.read_text(encoding="utf-8").split())) if times.exists() else 0.0
        found[part.title] = {"seconds": seconds, "rows": read_rows(rows)}
    document = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "dry": is_dry,
        "cores": len(os.sched_getaffinity(0)),
        **machine(),
        "parts": found,
    }
    (folder / f"{NAME}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / f"{NAME}.md").write_text(page(document), encoding="utf-8")


def publish(folder: Path) -> None:
    """Writes page and JSON of a folder into the docs."""
    document = json.loads((folder / f"{NAME}.json").read_text(encoding="utf-8"))
    if document["dry"] or any(commit.endswith(("-dirty", "unknown")) for commit in _commits(document)):
        sys.exit(f"make gpu-evidence: {folder} is of a dry run, or of no commit; nothing is published.")
    (DOCS / f"{NAME}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (DOCS / f"{NAME}.md").write_text(page(document), encoding="utf-8")


def page(document: Mapping[str, Any]) -> str:
    """Returns the page in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    note = "**A dry run on a CPU with tiny models: it shows that the command works.**\n\n" if document["dry"] else ""
    commits = _commits(document)
    sections = "".join(_section(title, part) for title, part in document["parts"].items())
    return f"""# Evidence from a GPU

<!-- Written by `make gpu-evidence`. -->

{note}{document["device"]}, {document["cores"]} cores. {document["created"][:10]}, commit {" and ".join(commits)}.
Versions: {versions}.

Each cell of the matrix trains once without a stop and once in resumed chunks; state and losses must be equal, byte for
byte. Without the part in its control, the weights must differ. Models of published sizes have random weights.
{sections}"""


def _commits(document: Mapping[str, Any]) -> list[str]:
    return sorted({row["commit"] for part in document["parts"].values() for row in part["rows"]}) or ["unknown"]


def _section(title: str, part: Mapping[str, Any]) -> str:
    rows: Sequence[Mapping[str, Any]] = sorted(part["rows"], key=lambda row: row["name"])
    head = f"\n## {title[:1].upper()}{title[1:]}\n\n"
    if not rows:
        return f"{head}Not run.\n"
    lines = [
        f"| {row['name']} | {row['outcome']} | {_cell(what)} | {_cell(value)} | {_cell(goal)} |"
        for row in rows
        for what, value, goal in row["figures"] or [("", row["why"] if row["outcome"] != "passed" else "", "")]
    ]
    passed = sum(row["outcome"] == "passed" for row in rows)
    return (
        f"{head}{passed} of {len(rows)} passed, in {part['seconds'] / 60:.1f} minutes.\n\n"
        f"| test | result | figure | value | goal |\n|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
