"""`python -m tools.schedules --number 1000000`: runs schedules, plants faults, and says what came of both."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tools.schedules import explore
from tools.schedules.explore import Result
from tools.schedules.planted import PLANTED, search
from tools.schedules.scenarios import SCENARIOS
from tools.schedules.scheduler import Choices, is_green

BATCH = 100
"""Schedules at once, times the share of their scenario."""
MOST_PLANTED = 5000


def main() -> int:
    """Runs the command, and returns 1 where a schedule broke an invariant or a planted fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tools.schedules", description=__doc__)
    parser.add_argument("--number", type=int, default=10_000, help="schedules in all")
    parser.add_argument("--first", type=int, default=0, help="first seed of each scenario")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="ends after so long, wherever it is")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", nargs=2, metavar=("SCENARIO", "SEED"), help="what happens in one schedule")
    parser.add_argument("--no-planted", action="store_true", help="leaves the planted faults out")
    args = parser.parse_args()
    if args.show:
        return show(args.show[0], int(args.show[1]))
    console = Console()
    if not is_green():
        console.print("greenlet is not installed: threads take its place, and far more time (`make test-schedules`).")
    results = run_all(args.number, args.first, args.processes, args.minutes, console)
    report(results, console)
    unfound = 0 if args.no_planted else plant(console)
    return int(unfound > 0 or any(result.broken for result in results.values()))


def show(name: str, seed: int) -> int:
    """Prints the calls of one schedule, and what it broke."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    log: list[str] = []
    house = explore.run_seed(scenario, seed, Choices(seed), log)
    print("\n".join(log), *house.truth.broken, sep="\n")
    return int(bool(house.truth.broken))


def batches(number: int, first: int) -> Iterator[tuple[int, range]]:
    """Yields the scenarios' seeds in batches, in proportion to the scenarios' shares."""
    shares = sum(scenario.share for scenario in SCENARIOS)
    ends = [first + max(1, round(number * scenario.share / shares)) for scenario in SCENARIOS]
    at = [first] * len(SCENARIOS)
    while any(place < end for place, end in zip(at, ends, strict=True)):
        for index, end in enumerate(ends):
            if at[index] < end:
                until = min(end, at[index] + BATCH * SCENARIOS[index].share)
                yield index, range(at[index], until)
                at[index] = until


def work(batch: tuple[int, range]) -> Result:
    """Runs one batch, in a process of its own."""
    return explore.explore(SCENARIOS[batch[0]], batch[1])


def run_all(number: int, first: int, processes: int, minutes: float, console: Console) -> dict[str, Result]:
    """Runs all batches and joins what came of them."""
    results = {scenario.name: Result(scenario.name) for scenario in SCENARIOS}
    ends = time.monotonic() + 60 * minutes
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with multiprocessing.get_context("fork").Pool(processes) as pool, Progress(*columns, console=console) as progress:
        task = progress.add_task("schedules", total=number)
        for result in pool.imap_unordered(work, batches(number, first)):
            results[result.scenario].add(result)
            progress.advance(task, result.schedules)
            if time.monotonic() > ends:
                pool.terminate()
                break
    return results


def plant(console: Console) -> int:
    """Plants each fault, and returns how many were not found."""
    table = Table("invariant", "planted fault", "scenario", "found after", title="Planted faults")
    unfound = 0
    for planted in PLANTED:
        found = search(planted, MOST_PLANTED)
        unfound += found is None
        after = f"{found:,} schedules" if found else "[red]not found[/]"
        table.add_row(", ".join(map(str, planted.invariant)), planted.name, planted.scenario, after)
    console.print(table)
    return unfound


def report(results: dict[str, Result], console: Console) -> None:
    """Prints the table of the scenarios."""
    table = Table("scenario", "schedules", "different", "calls", "seconds", "violations", title="Schedules")
    total = Result("all")
    for name, result in results.items():
        table.add_row(*result.cells())
        for broken in result.broken[:3]:
            console.print(f"[red]{name}[/], seed {broken[0]}: {broken[1]}")
        total.add(result)
    table.add_row(*total.cells())
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
