"""Which tests see which lines: measured once, with the tests' own processes and threads looked at too."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tools.mutation.choosing import OF_DECLARATIONS, is_runnable
from tools.mutation.operators import Mutant

Trace = Callable[[FrameType, str, Any], Any]


def trace(files: Sequence[str], root: Path, log: str) -> None:
    """Notes each line of some files with the test that runs it, here and in all forks of this process."""
    numbers = {os.path.realpath(root / file): number for number, file in enumerate(files)}
    by_name: dict[str, int | None] = {}
    seen: set[tuple[int, int, str]] = set()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def follow(frame: FrameType, event: str, _: Any) -> Trace:
        if event == "line":
            test, _, phase = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
            if phase == "(setup)":  # what is set up for one test others of its file look at
                test = test.partition("::")[0]
            entry = (by_name[frame.f_code.co_filename] or 0, frame.f_lineno, test)
            if entry not in seen:
                seen.add(entry)
                # At once: a process may be killed at any moment, as tests do.
                os.write(descriptor, f"{entry[0]}\t{entry[1]}\t{test}\n".encode())
        return follow

    def enter(frame: FrameType, _event: str, _: Any) -> Trace | None:
        name = frame.f_code.co_filename
        if name not in by_name:
            by_name[name] = numbers.get(os.path.realpath(name))
        return None if by_name[name] is None else follow

    sys.settrace(enter)
    threading.settrace(enter)


@dataclass
class Seen:
    """What was measured.

    Attributes:
        seconds: Test → how long it took, without what others of its file had set up for it.
        lines: File → line → tests.
        shared: File of tests → the longest preparation of one of them.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Seen:
        """Reads what was kept, nothing where there is none."""
        if not path.exists():
            return cls()
        document = json.loads(path.read_text(encoding="utf-8"))
        lines = {file: {int(line): tests for line, tests in of.items()} for file, of in document["lines"].items()}
        return cls(document["seconds"], lines, document["shared"])

    def keep(self, path: Path) -> None:
        """Keeps it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(self)), encoding="utf-8")

    def add(self, files: Sequence[str], log: Path, results: Sequence[dict[str, Any]]) -> None:
        """Adds a file of tests: the lines they ran, and of each that passed how long it took."""
        passed = {result["test"]: result for result in results if result["outcome"] == "passed"}
        for result in passed.values():
            self.seconds[result["test"]] = result["seconds"]
            file = result["test"].partition("::")[0]
            self.shared[file] = max(self.shared.get(file, 0.0), result["setup"])
        for number, line, name in _entries(log):
            tests = self.lines.setdefault(files[number], {}).setdefault(line, [])
            found = [test for test in passed if test == name or test.startswith(f"{name}::")]
            tests += [test for test in found if test not in tests]

    def has(self, file: str) -> bool:
        """Tells whether a file or folder was measured, even one of which no test passes here."""
        return file in self.shared or any(test.startswith(file) for test in self.seconds)

    def forget(self, file: str) -> None:
        """Forgets the tests of a file or folder."""
        self.seconds = {test: seconds for test, seconds in self.seconds.items() if not test.startswith(file)}
        self.shared = {name: seconds for name, seconds in self.shared.items() if not name.startswith(file)}
        for of in self.lines.values():
            for line, tests in of.items():
                of[line] = [test for test in tests if not test.startswith(file)]

    def tests(self, mutant: Mutant, span: tuple[int, int], budget: float) -> list[str]:
        """Returns the tests that may see a mutant, shortest first.

        Those that run its lines; where these run as the module is imported, those of its function, or of its file.

        Args:
            mutant: The mutant.
            span: First and last line of the function that it lies in.
            budget: Seconds that they may take together.
        """
        of = self.lines.get(mutant.path, {})
        for first, last in ((mutant.first, mutant.last), span, (0, sys.maxsize)):
            found = {test for line, tests in of.items() if first <= line <= last for test in tests if is_runnable(test)}
            if found:
                break
        if last == sys.maxsize:  # what is declared is used elsewhere
            found |= {test for test in self.seconds if test.startswith(OF_DECLARATIONS.get(mutant.path, ()))}
        # In a folder what is in a bucket is seen too, and no server has to be started.
        found -= {test for test in found if "[s3" in test and test.replace("[s3", "[folder") in found}
        chosen, total = [], 0.0
        for test in sorted(found, key=lambda test: (self.cost(test), test)):
            if chosen and total + self.seconds[test] > budget:
                break
            chosen.append(test)
            total += self.seconds[test]
        return chosen

    def cost(self, test: str) -> float:
        """Returns how long a test takes alone."""
        return self.seconds[test] + self.shared.get(test.partition("::")[0], 0.0)

    def total(self, tests: Sequence[str]) -> float:
        """Returns how long some tests take together."""
        files = {test.partition("::")[0] for test in tests}
        return sum(self.seconds[test] for test in tests) + sum(self.shared.get(file, 0.0) for file in files)


def _entries(log: Path) -> Iterator[tuple[int, int, str]]:
    for row in log.read_text(encoding="utf-8").splitlines():
        number, line, test = row.split("\t", 2)
        if test:
            yield int(number), int(line), test
