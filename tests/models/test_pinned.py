"""The models that a recipe names, held to the content that a run began with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ExactnessError, UserError
from baton.models import loading, pinned
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.support import tiny


@pytest.fixture
def teacher(tiny_base: str, tmp_path: Path) -> Path:
    """A folder with another model of the same tokenizer."""
    return Path(shutil.copytree(tiny_base, tmp_path / "teacher"))


def taught(base: str, teacher: Path, **model: Any) -> Recipe:
    """A recipe whose model learns from a teacher."""
    training = {"method": "distillation", "distillation": {"teacher": {"base": str(teacher), **model}}}
    return tiny.recipe(base, training=training)


def begun(recipe: Recipe, folder: Path) -> Run:
    """A run that has pinned its models."""
    run = Run(Storage(str(folder / "store")), "run")
    run.write_once(pinned.document(recipe, pinned.fetch(recipe)))
    return run


def test_each_model_has_its_digest_and_its_folder(tiny_base: str, teacher: Path, tmp_path: Path) -> None:
    recipe = taught(tiny_base, teacher)
    run = begun(recipe, tmp_path)
    assert run.require("model.json") == {
        "base_sha256": loading.model_identity(tiny_base),
        "teacher_sha256": loading.model_identity(str(teacher)),
    }
    assert pinned.compared(run, recipe) == {"base": tiny_base, "teacher": str(teacher)}


def test_a_run_without_a_second_model_says_what_it_said_before_there_was_any(tiny_base: str) -> None:
    alone = tiny.recipe(tiny_base)
    assert pinned.document(alone, pinned.fetch(alone)).to_json() == {"base_sha256": loading.model_identity(tiny_base)}
    from_scratch = alone.model_copy(update={"model": alone.model.model_copy(update={"base": None})})
    assert pinned.document(from_scratch, {}).to_json() == {"base_sha256": None}


def test_another_teacher_at_the_same_address_is_refused(tiny_base: str, teacher: Path, tmp_path: Path) -> None:
    recipe = taught(tiny_base, teacher, revision="abc")
    run = begun(recipe, tmp_path)
    weights = teacher / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ExactnessError) as caught:
        pinned.compared(run, recipe)
    assert f"training.distillation.teacher {str(teacher)!r} is not the model that this run began with" in str(
        caught.value
    )
    assert "pin training.distillation.teacher.revision" in str(caught.value)


def check(base: str, teacher: Path) -> None:
    """Compares tokens as the tokenize stage does."""
    recipe = taught(base, teacher)
    tokenizer = loading.load_tokenizer(base)
    pinned.require_same_tokens(recipe, tokenizer, loading.vocabulary_size(recipe, tokenizer, base), str(teacher))


def test_the_same_tokens_are_accepted_also_without_a_tokenizer(tiny_base: str, teacher: Path) -> None:
    check(tiny_base, teacher)
    for file in teacher.glob("*token*"):
        file.unlink()
    assert not list(teacher.glob("*token*"))
    check(tiny_base, teacher)
    (teacher / "config.json").unlink()
    with pytest.raises(Exception, match=r"config\.json|is not|Unrecognized"):
        check(tiny_base, teacher)


def test_a_vocabulary_of_another_size_is_refused(tiny_base: str, teacher: Path) -> None:
    config = json.loads((teacher / "config.json").read_text())
    size = config["vocab_size"]
    (teacher / "config.json").write_text(json.dumps({**config, "vocab_size": size + 64}))
    with pytest.raises(
        UserError, match=f"has a vocabulary of {size + 64} tokens, and the model that is trained one of"
    ):
        check(tiny_base, teacher)


def test_tokens_of_other_numbers_are_refused(tiny_base: str, teacher: Path) -> None:
    document = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    one, other = list(vocabulary)[20:22]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (teacher / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="has another tokenizer: 2 tokens have another number or none there, such as"):
        check(tiny_base, teacher)
