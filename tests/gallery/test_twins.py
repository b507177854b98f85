"""Each recipe of the gallery with a tiny twin of its model: two chunks end on the bits of one, and the export loads.

A part of CI by itself: a minute and a half with two workers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.search import PREVIOUS
from baton.runs.outcomes import ExportedModel
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.gallery import recipes, rows, twins

pytestmark = pytest.mark.slow
CASES = [pytest.param(path, id=path.stem) for path in recipes.PATHS]


@pytest.fixture
def twin(tmp_path: Path, legs: Any) -> Callable[[Path], Recipe]:
    """Makes a recipe's twin, and returns the recipe with it."""

    def make(path: Path) -> Recipe:
        for base, marks in recipes.needs(path):
            code, printed = legs.leg(twins.make, base, str(tmp_path / "twins" / base.replace("/", "--")), marks)
            assert code == 0, printed
        return recipes.with_twin(path, tmp_path)

    return make


def exported(run: Run, legs: Any) -> str:
    """Exports what a run has come to, loads it, and returns the folder."""
    code, printed = legs.leg(legs.export, run.uri)
    assert code == 0, printed
    folder = run.need(ExportedModel).model_uri
    scores = run.recipe().training.spec.scores
    kind = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    code, printed = legs.leg(twins.loaded, folder, kind)
    assert code == 0, printed
    return folder


def compared(recipe: Recipe, name: str, legs: Any) -> Run:
    """Trains a recipe in one chunk and in two, compares, and returns the latter run."""
    whole, parts = legs.prepare(recipe, f"{name}-whole"), legs.prepare(recipe, f"{name}-parts")
    legs.train(whole)
    legs.cut(parts, (3, recipes.STEPS))
    legs.train(parts)
    assert legs.losses(parts) == legs.losses(whole)
    assert legs.final(parts).meta.state == legs.final(whole).meta.state
    restored = legs.final(parts).meta.restored
    assert restored.step == 3
    assert set(restored.checked.values()) <= {"match", "absent"}
    assert legs.final(parts, 3).meta.state["weights"] != legs.final(parts).meta.state["weights"], "nothing is learned"
    return parts


@pytest.mark.parametrize("path", CASES)
def test_two_chunks_end_on_the_bits_of_one_and_the_export_loads(
    path: Path, twin: Callable[[Path], Recipe], legs: Any
) -> None:
    recipe = twin(path)
    folder = ""
    for part in recipe.phase_recipes() or [recipe]:
        if part.model.base == PREVIOUS:
            part = part.model_copy(update={"model": part.model.model_copy(update={"base": folder})})
        # Whole, whatever the recipe asks for; beside it an adapter where that is all it asks for.
        formats = ["safetensors", *(["adapter"] if part.export.formats == ["adapter"] else [])]
        part = part.model_copy(update={"export": part.export.model_copy(update={"formats": formats})})
        folder = exported(compared(part, part.name, legs), legs)


def test_without_its_optimizer_a_chunk_ends_on_other_bits(twin: Callable[[Path], Recipe], legs: Any) -> None:
    recipe = twin(recipes.GALLERY / "gemma3-dpo.yaml")
    whole, parts = legs.prepare(recipe, "whole"), legs.prepare(recipe, "parts")
    legs.train(whole)
    legs.cut(parts, (3, recipes.STEPS))
    legs.train(parts, leave_out=("optimizer",))
    assert legs.final(parts).meta.state["weights"] != legs.final(whole).meta.state["weights"]


def test_it_is_trained_again_on_from_the_model_in_use(
    tmp_path: Path, twin: Callable[[Path], Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = recipes.GALLERY / "smollm3-retrain.yaml"
    judged = load.load(str(path)).evaluation.model_copy(update={"samples": 2, "max_new_tokens": 4})
    recipe = twin(path).model_copy(update={"evaluation": judged})
    written = tmp_path / "smollm3-retrain.yaml"
    written.write_text(load.to_yaml(recipe), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "baton"), "retrain", str(written), "--output", "json"]

    def retrained() -> dict[str, str]:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        outcome: dict[str, str] = json.loads(done.stdout)
        return outcome

    first = retrained()
    assert (first["state"], first["words"]) == ("promoted", "model 1 of smollm3-retrain")
    feed = Path(recipe.data.sources[1].uri)
    feed.write_text(feed.read_text() + "".join(json.dumps(rows.support(5000 + n)) + "\n" for n in range(24)))
    second = retrained()
    assert (second["state"], second["words"]) == ("promoted", "model 2 of smollm3-retrain")
    assert Run(Storage(recipe.store.uri), second["run"]).recipe().model.base == first["model_uri"]
