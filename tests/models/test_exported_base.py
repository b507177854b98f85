"""A base that is another run's export: one that was damaged is made again at another address, and is the same base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.checkpoint.chain import CHAIN_FILE
from baton.errors import OtherRunError, UserError
from baton.models import loading
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage


def recipe(base: str) -> Recipe:
    document = {"name": "t", "model": {"base": base}, "data": {"source": "r.jsonl"}, "training": {"method": "sft"}}
    return load.validate(document, origin="r.yaml")


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "store"))


def export(store: Storage, tmp_path: Path) -> str:
    """Commits an export of run `first`, above a damaged one if there is one, and returns its address."""
    folder = tmp_path / "made"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    prefix = "runs/first/export"
    bundle.undamaged(store, prefix)
    manifest, _ = bundle.publish(store, prefix, str(folder), kind="model", meta={})
    bundle.clear_others(store, prefix, manifest)
    return store.uri(manifest.path(prefix))


def test_an_export_that_was_made_anew_is_found_at_its_first_address(store: Storage, tmp_path: Path) -> None:
    first = export(store, tmp_path)
    assert loading.local_model(first) == first
    (Path(first) / "config.json").write_text("damaged")
    second = export(store, tmp_path)
    assert second != first
    assert not Path(first).exists()
    assert loading.local_model(first) == second
    shutil.rmtree(Path(second).parent)
    with pytest.raises(UserError, match="is not a folder"):
        loading.local_model(first)


def test_a_run_continues_with_the_first_address_of_its_base(store: Storage) -> None:
    first, second = (store.uri(f"runs/first/export/{attempt * 12}") for attempt in "ab")
    run = Run(store, "second")
    run.create(recipe(first))
    run.create(recipe(second))
    assert run.recipe().model.base == first


@pytest.mark.parametrize(
    "other",
    ["runs/other/export/bbbbbbbbbbbb", "runs/first/export-12345678/bbbbbbbbbbbb", "runs/first/export/b", "elsewhere"],
)
def test_another_export_is_another_base(other: str, store: Storage) -> None:
    run = Run(store, "second")
    run.create(recipe(store.uri("runs/first/export/aaaaaaaaaaaa")))
    with pytest.raises(OtherRunError, match=r"model\.base"):
        run.create(recipe(store.uri(other)))


def test_the_seals_of_an_export_are_no_part_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = loading.model_identity(str(tmp_path))
    (tmp_path / CHAIN_FILE).write_text("[]")
    assert loading.model_identity(str(tmp_path)) == before
    (tmp_path / "tokenizer.json").write_text("{}")
    assert loading.model_identity(str(tmp_path)) != before
