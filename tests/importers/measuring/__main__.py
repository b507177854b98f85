"""Imports every example of two checkouts, and prints how many come through."""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from baton.errors import UserError
from baton.importers import axolotl, llamafactory
from baton.importers import draft as drafts
from baton.importers.draft import KeyResult, OtherTrainer, RecipeDraft
from tests.importers.measuring import made_up, steps

Document = dict[str, Any]

DATA = {"axolotl": ("base_model",), "LLaMA-Factory": ("model_name_or_path", "dataset")}
"""Keys that tell a training file from others beside it, by tool."""


@dataclass
class Measured:
    """What became of an example.

    Attributes:
        tool: Whose it is.
        path: Its path in the examples.
        refused: Why it does not import.
        left: Keys that are not carried over.
        sees: Whether it is for pictures or sound.
        failed: Why it takes no steps, empty where it does, None where it was not tried.
        seconds: How long that took.
    """

    tool: str
    path: str
    refused: str = ""
    left: list[str] = field(default_factory=list)
    sees: bool = False
    failed: str | None = None
    seconds: float = 0.0

    @property
    def kept_house(self) -> bool:
        """Whether nothing but housekeeping is left over."""
        return not self.refused and not self.sees and not self.left


def _draft(trainer: OtherTrainer, path: Path, root: Path) -> RecipeDraft:
    with contextlib.chdir(root):
        return drafts.draft_of(trainer, str(path), ".")


def measure(trainer: OtherTrainer, path: Path, root: Path, kept: Path | None) -> Measured | None:
    """Returns what becomes of an example, None for a file that is for no training; with `kept`, it takes steps too."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return None
    if not isinstance(document, dict) or not all(document.get(key) for key in DATA[trainer.tool]):
        return None
    measured = Measured(tool=trainer.tool, path=str(path.relative_to(root / "examples")))
    measured.sees = made_up.sees(document)
    try:
        draft = _draft(trainer, path, root)
        drafts.to_yaml(drafts.recipe_of(draft), draft)
    except UserError as error:
        measured.refused = error.message
        return measured
    left = (remark.key for remark in draft.remarks if remark.result is KeyResult.unsupported)
    measured.left = list(dict.fromkeys(re.sub(r"\[\d+\]", "[]", key) for key in left))
    if kept is not None and not measured.sees:
        began = time.monotonic()
        measured.failed = _steps(trainer, document, path, root, kept)
        measured.seconds = round(time.monotonic() - began, 2)
    return measured


def _steps(trainer: OtherTrainer, document: Document, path: Path, root: Path, kept: Path) -> str:
    folder = Path(tempfile.mkdtemp(prefix="measured-"))
    try:
        if trainer.tool == "axolotl":
            file = made_up.axolotl(document, path, folder)
        else:
            file = made_up.llamafactory(document, path, folder, root)
        draft = _draft(trainer, file, root)
        recipe = {"name": "measured", **copy.deepcopy(draft.document)}
        marks = tuple(map(str, document.get("eot_tokens") or ()))
        with contextlib.chdir(root):
            return steps.take(recipe, str(document[trainer.model]), marks, folder, kept)
    except Exception as error:  # whatever it is, it is the figure that this is about
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _table(measured: list[Measured]) -> str:
    lines = ["| | examples | import | pictures, sound | only housekeeping left over | take two steps |"]
    lines.append("|---|---|---|---|---|---|")
    for tool in DATA:
        mine = [one for one in measured if one.tool == tool]
        counts: tuple[Callable[[Measured], bool], ...] = (
            lambda one: not one.refused,
            lambda one: not one.refused and one.sees,
            lambda one: one.kept_house,
            lambda one: one.failed == "",
        )
        numbers = [len(mine), *(sum(map(count, mine)) for count in counts)]
        lines.append(f"| {tool} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def _reasons(measured: list[Measured]) -> str:
    lines = []
    for tool in DATA:
        mine = [one for one in measured if one.tool == tool]
        left = collections.Counter(key for one in mine for key in one.left)
        lines.append(f"\n{tool}, left over: " + ", ".join(f"{key} {count}" for key, count in left.most_common(40)))
        for what in ("refused", "failed"):
            why = collections.Counter(str(getattr(one, what)) for one in mine if getattr(one, what))
            for text, count in why.most_common():
                first = next(one.path for one in mine if getattr(one, what) == text)
                lines.append(f"{tool}, {what}: {count} × {text} ({first})")
        lines.append(f"{tool}, for pictures or sound: " + ", ".join(one.path for one in mine if one.sees))
    return "\n".join(lines)


def main() -> None:
    """Measures, and prints tables and reasons."""
    parser = argparse.ArgumentParser(prog="python -m tests.importers.measuring", description=__doc__)
    parser.add_argument("--axolotl", type=Path, required=True, help="checkout of axolotl")
    parser.add_argument("--llamafactory", type=Path, required=True, help="checkout of LLaMA-Factory")
    parser.add_argument("--steps", action="store_true", help="take two steps with a tiny twin of each model")
    parser.add_argument("--every", type=int, default=1, help="take every so many examples")
    parser.add_argument("--only", default="", help="take those whose path has this part")
    parser.add_argument("--json", type=Path, help="write what became of each example")
    chosen = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="twins-") as kept:
        for trainer, root in ((axolotl.TRAINER, chosen.axolotl), (llamafactory.TRAINER, chosen.llamafactory)):
            paths = [path for path in made_up.examples(root.resolve()) if chosen.only in str(path)]
            for path in paths[:: chosen.every]:
                one = measure(trainer, path, root.resolve(), Path(kept) if chosen.steps else None)
                if one:
                    measured.append(one)
                    if one.failed is not None:
                        print(f"{one.seconds:6.2f}s {one.path}: {one.failed or 'two steps'}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(one) for one in measured], indent=1), encoding="utf-8")
    print(f"\n{_table(measured)}\n{_reasons(measured)}")


if __name__ == "__main__":
    main()
