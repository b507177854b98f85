"""Outcomes of damage as a page.

python -m tests.end_to_end.damage_table docs/internals/damage.md [NOTES]    writes the page, after the tests' notes
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.end_to_end import damage

Table = dict[str, dict[str, int]]
"""Pattern of a damaged object → outcome → number."""

RECORD = Path(__file__).with_name("damage.json")
NOTES = Path("build/damage.jsonl")
"""Table of each part that was started, a line each, the last one counts."""
PARTS = 8
WORDS = {"repaired": "repaired", "told": "told by `verify`", "left": "left", "ended": "ended"}
ABSENT = {
    "attached.json": "of a script",
    "code.json": "of hooks",
    "data/*/code": "of hooks",
    "demo.html": "of `baton demo`",
    "export-*": "of a second export with other settings",
    "failed.json": "of a failed run",
    "failure.json": "of a sweep's trial",
    "fork.json": "of a fork",
    "hub.json": "needs the hub",
    "ends/end-*.json": "of a budget",
    "losses.json": "of a loss that Kubeflow's cache must know",
    "metrics/*.jsonl": "of a tracker",
    "micro_batch.json": "needs a GPU",
    "nodes.json": "of `capacity: spot-first`",
    "progress.json": "of a chunk that trains for ten seconds",
    "proof/restored-*.json": "of a killed chunk",
    "quality.jsonl": "of rows with findings",
    "recipe.yaml": "of `baton demo`",
    "registry.json": "needs MLflow",
    "rejected.jsonl": "of broken rows",
    "restarts/*.json": "of a lost process",
    "retrain.json": "of a retraining",
    "rows/chunk-*.json": "of `sweep.halving.sure`",
    "samples/*.json": "of `evaluation.sample_every`",
    "skips/step-*.json": "of a step that the guard found",
    "start/*": "of a fork",
    "tensorboard/**": "of a tracker",
    "tracking.json": "needs MLflow",
    "unsent/**": "needs MLflow",
    "wandb/**": "of a tracker",
    "warnings/*.json": "of a warning",
}
"""Pattern of an object in no run of the table, or not in each → why."""


INTRODUCTION = """\
# Damage

<!-- Written by `make docs` from tests/end_to_end/damage.json, the notes of `make test-all`. -->

Each object of a real run is damaged in turn: a flipped bit, emptied, cut, deleted, swapped with its neighbour, replaced
by an older version. One start follows, of a finished run and of one killed after its first chunk. Kinds and their
sources are in `baton/runs/objects.py`; `tests/end_to_end/test_damage.py` starts every case.

- **repaired**: same digests, weights and figures; nothing damaged is in use.
- **told**: the same, and `baton verify checkpoints` names an older checkpoint that nothing needed.
- **left**: the same; the value stays, and nothing contradicts it.
- **ended**: an error with its remedy.

"""


def tables() -> dict[str, Table]:
    """Returns the last table of each run."""
    found: dict[str, Table] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def started(subject: damage.Subject, cases: Iterable[damage.Case], part: int | None = None) -> list[str]:
    """Starts cases, notes the outcomes of a part of a run's table, and returns the faults."""
    faults, rows = list[str](), dict[str, Counter[str]]()
    for case in cases:
        word, outcome = subject.after(case)
        if fault := damage.fault(case, word, outcome):
            faults.append(fault)
        rows.setdefault(damage.pattern_of(case.name), Counter())[word] += 1
    if part is not None and not faults:
        NOTES.parent.mkdir(exist_ok=True)
        with NOTES.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps({"run": subject.name, "part": part, "objects": rows}) + "\n")
    return faults


def take(notes: Path) -> None:
    """Replaces the tables of runs whose parts have all been noted."""
    lines = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    parts = {(line["run"], line["part"]): line["objects"] for line in lines}
    found = tables()
    for name in damage.RUNS:
        noted = [parts[name, part] for part in range(PARTS) if (name, part) in parts]
        if len(noted) == PARTS:
            patterns = {pattern for table in noted for pattern in table}
            found[name] = {key: sum((Counter(table.get(key)) for table in noted), Counter()) for key in patterns}
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def markdown() -> str:
    """Returns the page."""
    parts = [INTRODUCTION]
    for name, rows in tables().items():
        total = sum((Counter(row) for row in rows.values()), Counter[str]())
        cells = ", ".join(f"{total[word]} {word}" for word in WORDS)
        parts.append(f"## {name}\n\n{total.total()} cases: {cells}.\n\n")
        parts.append(f"| object | {' | '.join(WORDS.values())} |\n")
        parts.append(f"|---|{'--:|' * len(WORDS)}\n")
        for pattern, row in sorted(rows.items()):
            parts.append(f"| `{pattern}` | {' | '.join(str(row.get(word, '')) for word in WORDS)} |\n")
        parts.append("\n")
    parts.append("## In no table\n\n| object | reason |\n|---|---|\n")
    parts += [f"| `{pattern}` | {why} |\n" for pattern, why in sorted(ABSENT.items())]
    return "".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    for each in sys.argv[2:]:
        take(Path(each))
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
