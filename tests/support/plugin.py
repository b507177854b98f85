"""Pytest's plugin of the Makefile: chooses tests, stops in time, and notes what passed.

`-p tests.support.plugin` loads it, and notes each test that passes or is skipped in `build/passes.jsonl`, at once.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import passes, selection

SHARED = pytest.StashKey[dict[str, Any]]()
NOT_RUN = "not run: too little time is left"
USUAL = 25.0
"""Seconds of a slow test that is not on record: the mean of 940, three at a time on two cores."""
LONG = 120.0
"""Seconds from which on a test begins early: later, too little time would be left for it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares what chooses tests."""
    group = parser.getgroup("choice", "tests of today")
    group.addoption("--share", metavar="I/N", help="only a share of the tests, by their hash; I may exceed N")
    group.addoption("--touched", metavar="REV", help="only tests that import what differs from REV, nearest first")
    group.addoption("--unpassed", action="store_true", help="leave out tests that have passed on this tree")
    group.addoption("--minutes", type=float, help="start no test that would end later; it counts as not run")
    group.addoption("--merge", action="append", type=Path, help="with --collect-only: merge this file into the record")


def pytest_configure(config: pytest.Config) -> None:
    """Decides once what all processes of a run have to agree on; not a worker of xdist, which is told."""
    if hasattr(config, "workerinput"):
        config.stash[SHARED] = config.workerinput["shared"]
        return
    option, shared = config.option, config.stash.setdefault(SHARED, {})
    shared["seconds"] = {key: entry["seconds"] for key, entry in passes.load().items() if "seconds" in entry}
    shared["until"] = time.time() + 60 * option.minutes if option.minutes else None
    try:
        shared["head"] = passes.git("rev-parse", "HEAD").strip()
        recorder = Recorder()
    except (OSError, subprocess.CalledProcessError) as error:  # no checkout: nothing to note, as no commit passed
        if option.minutes or option.touched or option.unpassed or option.merge:
            raise pytest.UsageError(f"this takes a Git checkout: {getattr(error, 'stderr', error)}") from None
        return
    config.pluginmanager.register(recorder, "passes")
    if option.unpassed:
        runs = passes.read_runs(passes.RUNS)
        shared["passed"] = [run["test"] for run in runs if run["tree"] == recorder.tree and "skipped" not in run]
    if option.touched:
        shared["distances"] = touched(option.touched)


def touched(revision: str) -> dict[str, int]:
    """Returns the distance of each module to what differs from a revision."""
    try:
        changed = passes.git("diff", "--name-only", revision, "--").splitlines()
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"--touched {revision}: {error.stderr.strip()}") from None
    changed += passes.git("ls-files", "--others", "--exclude-standard").splitlines()
    graph = selection.importers()
    return selection.distances(selection.modules_of(changed, graph), graph)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of xdist."""
    node.workerinput["shared"] = node.config.stash[SHARED]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not chosen, and has the nearest and longest begin first, else as a hash decides."""
    shared, option = config.stash[SHARED], config.option
    passed, found = set(shared.get("passed", ())), shared.get("distances")
    chosen = [
        item
        for item in items
        if item.nodeid not in passed
        and (not option.share or selection.in_share(item.nodeid, option.share))
        and (found is None or selection.distance(item.nodeid, found) is not None)
    ]
    if option.minutes:
        chosen.sort(
            key=lambda item: (
                selection.distance(item.nodeid, found) if found else 0,
                shared["seconds"].get(item.nodeid, USUAL) < LONG,
                selection.draw(shared["head"], item.nodeid),
            )
        )
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test for which too little time is left."""
    shared = item.config.stash[SHARED]
    if shared["until"] and time.time() + shared["seconds"].get(item.nodeid, USUAL) > shared["until"]:
        pytest.skip(NOT_RUN)


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Counts what was not run apart from what was skipped."""
    return ("not run", "n", "NOT RUN") if _reason(report) == NOT_RUN else None


def _reason(report: Any) -> str:
    """Returns why a test was skipped, if it was."""
    return str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped and report.longrepr else ""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Merges notes of runs into the record."""
    if not session.config.option.merge or session.testsfailed:  # what failed to import is missing here
        return
    tests, head = {}, passes.git("rev-list", "HEAD").split()
    runs = [run for path in session.config.option.merge for run in passes.read_runs(path)]
    for item in session.items:
        is_cell = "cell" in getattr(getattr(item, "callspec", None), "params", ())
        tests[item.nodeid] = is_cell or any(item.iter_markers("slow")) or any(item.iter_markers("gpu"))
        if any(item.iter_markers("gpu")):
            runs.append({"test": item.nodeid, "commit": head[0], "skipped": "needs a CUDA device (`make test-gpu`)"})
    record = passes.merge(passes.load(), runs, tests, set(head))
    passes.RECORD.write_text(passes.dumps(record), encoding="utf-8")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Takes an empty choice for a success: all may have passed before."""
    option = session.config.option
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and (option.share or option.touched or option.unpassed):
        session.exitstatus = pytest.ExitCode.OK


class Recorder:
    """Notes what passes, in the process that all reports come to."""

    def __init__(self) -> None:
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._look()

    def _look(self) -> None:
        """Takes note of the files, which may be edited while tests run."""
        self.tree, self.commit, self._looked = passes.tree_digest(), passes.clean_commit(), time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Appends a test's line once it has ended."""
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when != "teardown":
            return
        del self._reports[report.nodeid]
        reason = next(filter(None, map(_reason, reports)), None)
        if any(each.failed for each in reports) or reason == NOT_RUN:
            return
        if time.monotonic() - self._looked > 30:
            self._look()
        line: dict[str, Any] = {"test": report.nodeid, "commit": self.commit, "tree": self.tree}
        line["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
        line |= {"skipped": reason} if reason else {"seconds": round(sum(each.duration for each in reports), 1)}
        passes.RUNS.parent.mkdir(exist_ok=True)
        with passes.RUNS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Counts by file the tests that time was too short for."""
        files = Counter(report.nodeid.partition("::")[0] for report in terminalreporter.stats.get("not run", []))
        if files:
            terminalreporter.section("not run: the time was over")
            for file, count in sorted(files.items()):
                terminalreporter.write_line(f"{file}: {count}")
