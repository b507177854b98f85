"""`python -m tools.fuzz --minutes 60`: fuzzes what reads other people's bytes, each target in a process of its own."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.fuzz.driver import ROOT, Outcome, fuzz
from tools.fuzz.target import PLANTED, TARGETS, load

SHOWN = 3000
"""Characters from the end of what is told of a finding."""


def main() -> int:
    """Runs the command, and returns 1 where there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for how long, all targets side by side")
    parser.add_argument("--target", action="append", choices=[*TARGETS, *PLANTED], help="of several; all when left out")
    parser.add_argument(
        "--folder",
        type=lambda folder: Path(folder).resolve(),
        default=ROOT / "build" / "fuzzing",
        help="corpus, findings and logs",
    )
    parser.add_argument("--input", type=Path, help="a file of findings: what the target does with it, and nothing else")
    args = parser.parse_args()
    names = args.target or list(TARGETS)
    if args.input:
        load(names[0]).run(args.input.read_bytes())
        return 0
    with ThreadPoolExecutor(len(names)) as pool:
        outcomes = list(pool.map(lambda name: fuzz(name, args.folder / name, 60 * args.minutes), names))
    report(outcomes)
    return int(any(outcome.findings for outcome in outcomes))


def report(outcomes: list[Outcome]) -> None:
    """Prints what came of it."""
    console = Console(width=140)
    table = Table("target", "inputs", "a second", "branches", "corpus", "MiB at most", "findings")
    for outcome in outcomes:
        rate = outcome.executions / max(outcome.seconds, 1)
        numbers = f"{outcome.executions:,}", f"{rate:.0f}", f"{outcome.edges:,}", f"{outcome.corpus:,}"
        table.add_row(outcome.name, *numbers, f"{outcome.peak:.0f}", str(len(outcome.findings)))
    console.print(table)
    for outcome in outcomes:
        for finding in outcome.findings:
            again = f"python -m tools.fuzz --target {outcome.name} --input {finding.with_suffix('.bin')}"
            told = finding.read_text(encoding="utf-8")
            console.print(f"[red]{outcome.name}[/]: {again}")
            console.print(told.partition("\n")[0], told[-SHOWN:], sep="\n", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
