"""`python -m tools.mutation`, as `make test-mutants` runs it: mutants of the code that saves and restores.

First the tests are run once, to see which of them run which lines; what was seen is kept in `build/mutation/` and used
until `--measure` asks for more. Then each mutant that is drawn is run in a fork, its shortest tests first, until one
fails. Results are kept too: a mutant runs again where its file has changed, or with `--again` where it survived.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.mutation import choosing, report
from tools.mutation.choosing import ROOT
from tools.mutation.equivalent import EQUIVALENT
from tools.mutation.operators import Mutant
from tools.mutation.seen import Seen, trace

FOLDER = ROOT / "build" / "mutation"
console = Console(width=None if sys.stdout.isatty() else 150)


def main() -> int:
    """Measures, runs mutants, and returns 1 where too few are killed."""
    options = _options()
    seen = Seen.load(FOLDER / "seen.json")
    mutants = [mutant for mutant in choosing.all_mutants() if any(part in mutant.path for part in options.files)]
    chosen = choosing.drawn(mutants, options.number, options.seed)
    if options.key:
        chosen = [mutant for mutant in mutants if options.key in mutant.key]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.first:5d} {mutant.key}")
        return 0
    stale = EQUIVALENT.keys() - {mutant.key for mutant in choosing.all_mutants()}
    if stale:
        console.print(f"[red]no mutants any more, yet listed as equivalent[/]: {sorted(stale)}", markup=True)
    results = Results(FOLDER / "results.json")
    unmeasured = options.measure or [file for file in choosing.tests() if not seen.has(file)]
    todo = [mutant for mutant in chosen if mutant.key not in EQUIVALENT and results.lacks(mutant, options.again)]
    if unmeasured or todo:
        from tools.mutation.forks import Forks

        forks = Forks()
        for file in unmeasured:
            _measure(forks, seen, file)
            seen.keep(FOLDER / "seen.json")
        _run(forks, seen, todo, results, options)
    return report.show(console, mutants, chosen, results.of, FOLDER / "survivors.md")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("--number", type=int, default=240, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="*", default=[""], help="parts of the names of files to mutate")
    parser.add_argument("--key", help="run the mutants whose name has this in it, in place of those drawn")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that a mutant's tests may take, unmutated")
    parser.add_argument("--measure", nargs="*", help="files of tests whose lines are looked at again; all where none")
    parser.add_argument("--again", action="store_true", help="run those again that survived")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    options = parser.parse_args()
    if options.measure == []:
        options.measure = choosing.tests()
    return options


class Results:
    """What has become of mutants, kept in a file.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.of: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def lacks(self, mutant: Mutant, again: bool) -> bool:
        """Tells whether a mutant is still to be run."""
        found = self.of.get(mutant.key)
        if found is None or found["source"] != _source_digest(mutant):
            return True
        return again and found["outcome"] not in ("killed", "timed out")

    def note(self, mutant: Mutant, **result: Any) -> None:
        """Keeps what has become of a mutant."""
        self.of[mutant.key] = {**result, "source": _source_digest(mutant)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.of, indent=1, ensure_ascii=False), encoding="utf-8")


def _source_digest(mutant: Mutant) -> str:
    return hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:16]


def _measure(forks: Any, seen: Seen, file: str) -> None:
    """Runs a file of tests once, and notes which lines they run."""
    from tools.mutation import forks as forking

    def work(scratch: Path) -> object:
        trace(choosing.FILES, ROOT, str(scratch / "lines.txt"))
        chosen = () if "::" in file else ("-m", "not slow and not gpu")
        recorder = forking.run_tests([file], None, scratch, *chosen)
        return list(recorder.results.values())

    scratch, began = forking.scratch_folder(), time.monotonic()
    pid = forks.begin(work, scratch)
    _, late = forking.wait_for({pid: began + 900})
    results = [] if late else json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    if isinstance(results, dict):
        raise SystemExit(results["error"])
    seen.forget(file)
    seen.shared[file] = 0.0
    if (scratch / "lines.txt").exists():
        seen.add(choosing.FILES, scratch / "lines.txt", results)
    counts = {outcome: sum(result["outcome"] == outcome for result in results) for outcome in ("passed", "failed")}
    console.print(f"{file}: {counts['passed']} tests in {time.monotonic() - began:.0f} s", highlight=False)
    if counts["failed"] or late:
        console.print((scratch / "output.txt").read_text(encoding="utf-8")[-6000:], markup=False)
    forking.clear(scratch)


def _run(forks: Any, seen: Seen, todo: Sequence[Mutant], results: Results, options: argparse.Namespace) -> None:
    from tools.mutation import forks as forking

    running: dict[int, tuple[Mutant, list[str], Path, float]] = {}
    until: dict[int, float] = {}
    left = list(todo)
    while left or running:
        while left and len(running) < options.jobs:
            mutant = left.pop(0)
            tests = seen.tests(mutant, _span(mutant), options.budget)
            if not tests:
                results.note(mutant, outcome="not run", by="no test runs it", seconds=0.0)
                continue
            scratch = forking.scratch_folder()
            pid = forks.begin(lambda at, mutant=mutant, tests=tests: _tested(forks, mutant, tests, at), scratch)
            running[pid] = (mutant, tests, scratch, time.monotonic())
            until[pid] = time.monotonic() + 30 + 4 * seen.total(tests)
        if not running:
            continue
        pid, late = forking.wait_for(until)
        mutant, tests, scratch, began = running.pop(pid)
        del until[pid]
        outcome, by = _judged(scratch, late, tests)
        seconds = round(time.monotonic() - began, 1)
        results.note(mutant, outcome=outcome, by=by, seconds=seconds)
        console.print(
            f"{len(left):4d} left  {outcome:9s} {seconds:5.1f} s  {mutant.key}  {by}", highlight=False, markup=False
        )
        forking.clear(scratch)


def _tested(forks: Any, mutant: Mutant, tests: Sequence[str], scratch: Path) -> object:
    from tools.mutation import forks as forking

    forks.lay_over(mutant, (ROOT / mutant.path).read_bytes())
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    recorder = forking.run_tests(files, tests, scratch, "-x")
    return list(recorder.results.values())


def _judged(scratch: Path, late: bool, tests: Sequence[str]) -> tuple[str, str]:
    """Returns what has become of a mutant, and by which test."""
    if late:
        return "timed out", ""
    try:
        results = json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return "killed", "the process died"
    if isinstance(results, dict):
        return ("killed", "as it is imported") if "lay_over" not in results["error"] else ("error", results["error"])
    failed = next((result["test"] for result in results if result["outcome"] == "failed"), None)
    if failed:
        return "killed", failed
    ran = {result["test"] for result in results if result["outcome"] == "passed"}
    if ran < set(tests):
        missing = len(set(tests) - ran)
        return "error", f"{missing} of {len(tests)} tests did not run: {(scratch / 'output.txt').read_text()[-600:]}"
    return "survived", f"{len(tests)} tests"


def _span(mutant: Mutant) -> tuple[int, int]:
    """Returns the first and last line of the function that a mutant lies in."""
    innermost = (0, sys.maxsize)
    for node in ast.walk(ast.parse((ROOT / mutant.path).read_bytes())):
        last = getattr(node, "end_lineno", 0) or 0
        if isinstance(node, ast.FunctionDef) and innermost[0] < node.lineno <= mutant.first <= last:
            innermost = (node.lineno, last)
    return innermost


if __name__ == "__main__":
    sys.exit(main())
