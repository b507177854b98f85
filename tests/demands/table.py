"""The demands as a page: `python -m tests.demands.table docs/internals/demands.md` (`make docs`)."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
KINDS = ("reproduced", "fixture", "mended")
INTRODUCTION = """\
# What users of other tools report

<!-- Written by `make docs` from the docstrings of tests/demands/; edit those instead. -->

Each row is a symptom that somebody has reported in public. Its test has two halves: one that shows the symptom, and
one that runs Baton in the same place and shows it absent, by an equality or by a message that names what is wrong.
How it is shown upstream:

- **reproduced**: by the tool itself, in the version that Baton is locked to, on a CPU without a network;
- **fixture**: by a few lines that do what the tool does, where the tool is not installed here;
- **mended**: the tool no longer has it; the test says what it does instead.

`python -m pytest tests/demands` runs them all, `-m "not slow"` those that take seconds.

"""
FIELD = re.compile(r"^(Issue|Upstream|Baton): (.*(?:\n    .*)*)", re.MULTILINE)
ADDRESS = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A test module's docstring, and the tests that are in it.

    Attributes:
        module: Name of its file.
        symptom: What is reported, a sentence.
        issues: Addresses of the reports.
        upstream: How it is shown.
        baton: What Baton does.
        tests: Names of the test functions.
    """

    module: str
    symptom: str
    issues: tuple[str, ...]
    upstream: str
    baton: str
    tests: tuple[str, ...]

    @property
    def kind(self) -> str:
        """How it is shown, in a word."""
        return re.split(r"[ .,:]", self.upstream, maxsplit=1)[0]


def demands() -> list[Demand]:
    """Returns all demands, by the names of their modules."""
    return [_read(path) for path in sorted(HERE.glob("test_*.py")) if path.stem != "test_table"]


def _read(path: Path) -> Demand:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree) or ""
    fields = {name: " ".join(text.split()) for name, text in FIELD.findall(docstring)}
    named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return Demand(
        module=path.name,
        symptom=docstring.partition("\n")[0],
        issues=tuple(fields["Issue"].split()),
        upstream=fields["Upstream"],
        baton=fields["Baton"],
        tests=tuple(named),
    )


def short(issue: str) -> str:
    """Returns an address as it is written in texts."""
    return ADDRESS.sub(r"\1#\2", issue)


def markdown() -> str:
    """Returns the page."""
    lines = ["| report | symptom | upstream | Baton | test |", "|---|---|---|---|---|"]
    for demand in demands():
        reports = ", ".join(f"[{short(issue)}]({issue})" for issue in demand.issues)
        upstream = f"**{demand.kind}**{demand.upstream.removeprefix(demand.kind)}"
        baton = demand.baton[0].upper() + demand.baton[1:]
        cells = [reports, demand.symptom, upstream, baton, f"[{demand.module}](../../tests/demands/{demand.module})"]
        lines.append(f"| {' | '.join(cells)} |")
    counts = {kind: sum(demand.kind == kind for demand in demands()) for kind in KINDS}
    total = f"{sum(counts.values())} symptoms: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + "."
    return INTRODUCTION + "\n".join([*lines, "", total, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
