"""The record of passes: each test's last commit, date and seconds, in `tests/passes.json`.

Runs of pytest append to `build/passes.jsonl` (`tests/support/plugin.py`); `make passes` merges such files into the
record and writes its pages: `python -m tests.support.passes docs/internals/passes.md`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "build" / "passes.jsonl"
RECORD = ROOT / "tests" / "passes.json"
WRITTEN = ("tests/passes.json", "docs/internals/matrix.md", "docs/internals/passes.md")
"""Files that a merge writes: they make no other tree."""

Entry = dict[str, Any]
"""`commit`, `date`, `seconds` of a pass, for a file also the number of `tests`; or `skipped`, a reason; or nothing."""
Record = dict[str, Entry]
"""Slow tests, cells of the matrix and skipped tests by node id; a file's other tests together, by its path."""


def git(*arguments: str) -> str:
    """Returns the output of a Git command in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def tree_digest() -> str:
    """Returns the digest of all files that Git does not ignore, committed or not."""
    digest = hashlib.sha256()
    for name in sorted(git("ls-files", "-z", "-co", "--exclude-standard", "--deduplicate").split("\0")):
        path = ROOT / name
        if name in WRITTEN or not (path.is_file() or path.is_symlink()):
            continue
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def clean_commit() -> str | None:
    """Returns the commit of this tree, or None where files differ from it."""
    differs = git("status", "--porcelain", "--", ".", *(f":!{name}" for name in WRITTEN))
    return None if differs else git("rev-parse", "HEAD").strip()


def read_runs(path: Path) -> list[Entry]:
    """Returns the lines of a file that runs have appended to, without those that a kill cut off."""
    found: list[Entry] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def load() -> Record:
    """Returns the repository's record."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def dumps(record: Record) -> str:
    """Returns a record as JSON, a line for each entry: merges of branches stay easy."""
    lines = (f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(record.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def merge(record: Record, runs: Iterable[Entry], tests: Mapping[str, bool], history: Collection[str]) -> Record:
    """Returns the record with newer passes, without tests that no longer exist.

    Args:
        record: The record so far.
        runs: Lines of runs. Passes of uncommitted trees and of commits outside `history` do not count.
        tests: All tests of today: node id → whether it has an entry of its own.
        history: Commits that count.
    """
    lines = [line for line in runs if line["commit"] in history and line["test"] in tests]
    skipped = {line["test"]: line["skipped"] for line in lines if "skipped" in line}
    key_of = {
        test: test if own or test in record or test in skipped else test.partition("::")[0]
        for test, own in tests.items()
    }
    members: dict[str, set[str]] = defaultdict(set)
    for test, key in key_of.items():
        members[key].add(test)
    passes: dict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
    for line in sorted((line for line in lines if "skipped" not in line), key=lambda line: line["date"]):
        passes[key_of[line["test"]], line["commit"]][line["test"]] = line
    merged = {key: record.get(key, {}) for key in members}
    for (key, commit), found in passes.items():
        date = max(line["date"] for line in found.values())
        if found.keys() == members[key] and date >= merged[key].get("date", ""):
            seconds = round(sum(line["seconds"] for line in found.values()), 1)
            merged[key] = {"commit": commit[:12], "date": date, "seconds": seconds}
            if key not in tests:
                merged[key]["tests"] = len(found)
    for test, reason in skipped.items():
        if "commit" not in merged[test]:
            merged[test] = {"skipped": reason}
    return merged


INTRODUCTION = """\
# Last passes

<!-- Written by `make passes` from tests/passes.json. -->

`.ci/run` runs all quick tests, then slow ones: those that import code that the commit touched (`make
test-touched`), and a share that changes with the commit (`make test-part`). `make test-all` and the nightly workflow
run all. Each run notes what passed; `make passes` merges the notes of clean trees into `tests/passes.json`, from which
this page and [the matrix](matrix.md) are written.

"""


def markdown(record: Record) -> str:
    """Returns the page of a record."""
    files: dict[str, list[Entry]] = defaultdict(list)
    reasons: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    never: dict[str, int] = defaultdict(int)
    for key, entry in sorted(record.items()):
        path, _, test = key.partition("::")
        if "skipped" in entry:
            reasons[entry["skipped"]][path] += 1
        elif "commit" not in entry:
            never[path] += 1
        else:
            files[path if test else "all quick tests"].append(entry)
    lines = [INTRODUCTION + "| tests | passed | minutes | oldest pass | newest pass |\n|---|--:|--:|---|---|"]
    for path, entries in files.items():
        ordered = sorted(entries, key=lambda entry: str(entry["date"]))
        ends = [f"{entry['date'][:10]}, `{entry['commit'][:7]}`" for entry in (ordered[0], ordered[-1])]
        count = sum(entry.get("tests", 1) for entry in entries)
        minutes = sum(entry["seconds"] for entry in entries) / 60
        lines.append(f"| {path} | {count} | {minutes:.1f} | {' | '.join(ends)} |")
    lines.append("\n## Not run\n\n| reason | tests |\n|---|---|")
    for reason, paths in [*sorted(reasons.items()), ("no pass on record", never)]:
        if paths:
            lines.append(f"| {reason} | {', '.join(f'{path} ({count})' for path, count in paths.items())} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(load()), encoding="utf-8")
