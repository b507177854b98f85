"""Outcomes of damage as a page.

python -m tests.end_to_end.damage_table RUN…                         starts each case of these runs
python -m tests.end_to_end.damage_table docs/internals/damage.md    writes the page (`make docs`)
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TypedDict

from tests.end_to_end import damage

RECORD = Path(__file__).with_name("damage.json")
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
    "samples/*.json": "of `evaluation.sample_every`",
    "rows/chunk-*.json": "of a sweep's trial",
    "scores/chunk-*.json": "of a sweep's trial",
    "skips/step-*.json": "of a step that the guard found",
    "start/*": "of a fork",
    "tensorboard/**": "of a tracker",
    "tracking.json": "needs MLflow",
    "trial.json": "of a sweep's trial",
    "unsent/**": "needs MLflow",
    "wandb/**": "of a tracker",
    "warnings/*.json": "of a warning",
}
"""Pattern of an object in no run of the table, or not in each → why."""


class Table(TypedDict):
    """Outcomes of a run: `started` of `cases`, by the pattern of the damaged object."""

    cases: int
    started: int
    objects: dict[str, dict[str, int]]


INTRODUCTION = """\
# Damage

<!-- Written by `make docs` from tests/end_to_end/damage.json; measure that anew instead. -->

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


def measure(name: str, most: int | None = None) -> list[str]:
    """Starts the cases of a run, or `most` of them by hash; notes the outcomes, and returns the faults."""
    faults, rows = [], dict[str, Counter[str]]()
    with tempfile.TemporaryDirectory(prefix="damaged-") as folder:
        subject = damage.Subject(name, Path(folder))
        patterns = {name: kind.pattern for name in [*subject.whole, *subject.half] if (kind := damage.kind_of(name))}
        rows = {pattern: Counter() for pattern in patterns.values() if pattern not in ABSENT}
        cases = sorted((case for case in subject.cases() if patterns.get(case.name) in rows), key=damage.number)
        for case in cases[:most]:
            word, outcome = subject.after(case)
            if fault := damage.fault(case, word, outcome):
                faults.append(fault)
                print(fault, flush=True)
            rows[patterns[case.name]][word] += 1
        subject.close()
    table = Table(cases=len(cases), started=len(cases[:most]), objects={key: dict(row) for key, row in rows.items()})
    before = tables() if RECORD.exists() else {}
    RECORD.write_text(json.dumps({**before, name: table}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return faults


def markdown() -> str:
    """Returns the page."""
    parts = [INTRODUCTION]
    for name, table in tables().items():
        rows = table["objects"]
        total = sum((Counter(row) for row in rows.values()), Counter[str]())
        cells = ", ".join(f"{total[word]} {word}" for word in WORDS)
        parts.append(f"## {name}\n\n{table['started']} of {table['cases']} cases were started: {cells}.\n\n")
        parts.append(f"| object | {' | '.join(WORDS.values())} |\n")
        parts.append(f"|---|{'--:|' * len(WORDS)}\n")
        for pattern, row in sorted(rows.items()):
            parts.append(f"| `{pattern}` | {' | '.join(str(row.get(word, '')) for word in WORDS)} |\n")
        parts.append("\n")
    if ABSENT:
        parts.append("## In no table\n\n| object | reason |\n|---|---|\n")
        parts += [f"| `{pattern}` | {why} |\n" for pattern, why in sorted(ABSENT.items())]
    return "".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    if sys.argv[1].endswith(".md"):
        Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
    else:
        sys.exit(bool(measure(sys.argv[1], *map(int, sys.argv[2:]))))
