"""Examples in the two formats, and the making of a recipe from one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.importers import axolotl, llamafactory
from baton.importers import draft as drafts
from baton.importers.draft import KeyResult, OtherTrainer, RecipeDraft
from baton.recipe.recipe import Recipe

HERE = Path(__file__).parent
TRAINERS: dict[str, OtherTrainer] = {"llamafactory": llamafactory.TRAINER, "axolotl": axolotl.TRAINER}


class Imported:
    """What became of a file.

    Attributes:
        draft: The recipe in the making.
        recipe: The recipe.
        yaml: Its file.
    """

    def __init__(self, draft: RecipeDraft) -> None:
        self.draft = draft
        self.recipe: Recipe = drafts.recipe_of(draft)
        self.yaml = drafts.to_yaml(self.recipe, draft)

    def keys(self, fate: KeyResult) -> set[str]:
        """Return the keys of one fate."""
        return {remark.key for remark in self.draft.remarks if remark.result is fate}

    def text(self, key: str) -> str:
        """Return what is said of a key."""
        return "\n".join(remark.text for remark in self.draft.remarks if remark.key == key)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, which is also the current one."""
    for name in TRAINERS:
        shutil.copytree(HERE / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def imported(folder: Path) -> Callable[[str], Imported]:
    """Make a recipe from an example, such as `axolotl/dpo.yml`."""

    def make(name: str) -> Imported:
        tool = name.partition("/")[0]
        return Imported(drafts.draft_of(TRAINERS[tool], name, tool))

    return make


@pytest.fixture
def written(folder: Path) -> Callable[[str, str], Imported]:
    """Make a recipe from text."""

    def make(tool: str, text: str) -> Imported:
        (folder / "train.yaml").write_text(text, encoding="utf-8")
        return Imported(drafts.draft_of(TRAINERS[tool], "train.yaml", str(folder)))

    return make
