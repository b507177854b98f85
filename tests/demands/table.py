"""The demands as a page: `python -m tests.demands.table docs/internals/demands.md` (`make docs`)."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
KINDS = ("reproduced", "fixture", "fixed")
INTRODUCTION = """\
# Demands

<!-- Written by `make docs` from the docstrings of tests/demands/; edit those instead. -->

Symptoms that users of other tools reported in public. One half of each test shows the symptom upstream; the other runs
Baton in the same place, and compares or expects a message. Upstream halves are:

- **reproduced**: by the tool itself, in the locked version, on a CPU without a network;
- **fixture**: by a few lines with the tool's mechanism, where the tool is not installed;
- **fixed**: the tool no longer shows it; the test shows its behaviour today.

`python -m pytest tests/demands` runs all of them, `-m "not slow"` the quick ones.

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
    """Returns the page: a section for each demand."""
    parts = []
    for demand in demands():
        reports = ", ".join(f"[{short(issue)}]({issue})" for issue in demand.issues)
        upstream = demand.upstream.removeprefix(demand.kind).lstrip(".,: ")
        baton = demand.baton[0].upper() + demand.baton[1:]
        parts.append(
            f"## {short(demand.issues[0])}\n\n{demand.symptom}\n\n"
            f"- **Upstream, {demand.kind}:** {upstream[0].upper()}{upstream[1:]}\n- **Baton:** {baton}\n"
            f"- {reports}; test: [{demand.module}](../../tests/demands/{demand.module})\n"
        )
    counts = {kind: sum(demand.kind == kind for demand in demands()) for kind in KINDS}
    total = f"{sum(counts.values())} symptoms: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + "."
    return "\n".join([INTRODUCTION.rstrip(), "", total, "", *parts])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
