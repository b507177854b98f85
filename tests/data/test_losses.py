"""What the baton tells Kubeflow's cache about a run: the same again, until something that was left is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.store import CheckpointStore
from baton.data import split
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import usable_manifest
from baton.store.storage import Storage

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 4},
}
TOKENS = "data/abc/tokens"


def cache_key(run: Run) -> str:
    """Returns the part of the baton that changes where something is gone."""
    return str(split.run_ref(run)).rpartition("#")[2]


def _checkpoint(run: Run, step: int, folder: Path) -> None:
    files = folder / str(step)
    files.mkdir()
    (files / "model.safetensors").write_bytes(b"weights")
    meta = {"run": run.name, "step": step, "digest": "d"}
    bundle.publish(run.storage, CheckpointStore(run).prefix(step), str(files), kind="checkpoint", meta=meta)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(store: Path, tmp_path: Path) -> Run:
    """A run whose tokens are made, and whose checkpoints of steps 2 and 4 have been read back."""
    run = Run(Storage(str(store)), "mine")
    run.create(Recipe.model_validate(RECIPE))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/part.arrow").write_bytes(b"rows")
    bundle.publish(run.storage, TOKENS, str(tmp_path / "tokens"), kind="tokens", meta={})
    for name in ("model.json", "plan.json"):
        run.put(name, {})
    run.put("tokens.json", {"prefix": TOKENS})
    run.record("tokenize", {})
    for step in (2, 4):
        _checkpoint(run, step, tmp_path)
    run.put("promoted.json", {"newest": {"step": 4, "uri": ""}})
    return run


def test_it_is_the_same_again(run: Run) -> None:
    assert cache_key(run) == cache_key(run)
    assert run.raw("losses.json") is None


def test_a_run_before_its_first_stage_has_lost_nothing(store: Path) -> None:
    run = Run(Storage(str(store)), "new")
    run.create(Recipe.model_validate(RECIPE))
    assert cache_key(run) == f"{run.require('recipe.json')['created']}.0"


def test_retention_is_no_loss(run: Run, store: Path) -> None:
    before = cache_key(run)
    shutil.rmtree(store / "runs/mine/checkpoints/step-00000002")
    assert cache_key(run) == before


def test_a_chunks_own_word_counts_before_anybody_has_read_its_checkpoint_back(run: Run) -> None:
    run.record("train-chunk-001", {"to_step": 4})
    assert cache_key(run)[-2:] == ".0"
    run.record("train-chunk-002", {"to_step": 6})
    assert cache_key(run)[-2:] == ".1"


def test_a_step_beyond_the_newest_verified_one_is_no_loss(run: Run, store: Path, tmp_path: Path) -> None:
    before = cache_key(run)
    _checkpoint(run, 6, tmp_path)
    shutil.rmtree(store / "runs/mine/checkpoints/step-00000004")
    assert cache_key(run) == before


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("runs/mine/checkpoints/step-00000004/manifest.json", "runs/mine/checkpoints/step-00000004"),
        ("runs/mine/checkpoints/step-00000004/*/model.safetensors", "runs/mine/checkpoints/step-00000004"),
        ("data/abc/tokens/manifest.json", TOKENS),
        ("data/abc/tokens/*/part.arrow", TOKENS),
        ("runs/mine/plan.json", "plan.json"),
        ("runs/mine/tokens.json", "tokens.json"),
    ],
)
def test_a_loss_changes_it_once(gone: str, said: str, run: Run, store: Path) -> None:
    before = cache_key(run)
    (path,) = store.glob(gone)
    path.unlink()

    after = cache_key(run)

    assert (before[-2:], after[-2:]) == (".0", ".1")
    assert before[:-2] == after[:-2]
    assert [loss["lost"] for loss in run.require("losses.json")["losses"]] == [said]


def test_tokens_without_their_files_are_made_anew(run: Run, store: Path) -> None:
    (path,) = store.glob("data/abc/tokens/*/part.arrow")
    path.unlink()
    assert usable_manifest(run.storage, TOKENS) is not None
    cache_key(run)
    assert usable_manifest(run.storage, TOKENS) is None


def test_a_run_that_was_deleted_and_made_again_has_another(run: Run, store: Path) -> None:
    before = cache_key(run)
    shutil.rmtree(store / "runs/mine")
    run.create(Recipe.model_validate(RECIPE))
    assert cache_key(run)[:-2] != before[:-2]
