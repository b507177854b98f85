"""With `data.order: blocks` a chunk needs its own files of tokens alone, and chunks still end on one run's bits."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.models import trained
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train.tokens import Blocks, needed_files


def prepare(recipe: Recipe, name: str, legs: Any) -> Run:
    """Split and tokenize, in many files."""
    cutting = importlib.import_module("cutting")
    code, printed = legs.leg(cutting.split_and_tokenize, load.dumps(recipe), name)
    assert code == 0, printed
    return Run(Storage(recipe.store.uri), name)


def files_of(run: Run) -> list[str]:
    """The paths of the training files, in their order."""
    prefix, manifest = trained.tokens_manifest(run)
    return [run.storage.key(manifest.path(prefix, name)) for name, _ in manifest.meta["files"]["train"]]


def needed_for(run: Run, start: int, target: int) -> set[int]:
    """Numbers of the files that a chunk needs."""
    _, manifest = trained.tokens_manifest(run)
    blocks = Blocks([rows for _, rows in manifest.meta["files"]["train"]], run.recipe().seed)
    return needed_files(blocks, run.recipe(), run.plan().steps_per_epoch, start, target)


@contextlib.contextmanager
def without(paths: Sequence[str]) -> Iterator[None]:
    """Takes files out of the store for a while."""
    for path in paths:
        os.rename(path, f"{path}.away")
    try:
        yield
    finally:
        for path in paths:
            os.rename(f"{path}.away", path)


def alone(run: Run, index: int, start: int, legs: Any) -> Any:
    """Runs a chunk in a store that holds its own files alone; returns its exit code and what it printed."""
    files, kept = files_of(run), needed_for(run, start, run.plan().target(index))
    with without([path for number, path in enumerate(files) if number not in kept]):
        return legs.leg(legs.chunk, run.uri, index)


@pytest.fixture(scope="module")
def recipe(recipes: dict[str, Recipe], legs: Any) -> Recipe:
    """Two passes over rows in more files than a group has, with a ragged last batch."""
    changes = {"data__order": "blocks", "data__max_samples": 170, "training__epochs": 2.0}
    found: Recipe = legs.changed(recipes["scratch"], **changes)
    return found


@pytest.fixture(scope="module")
def whole(recipe: Recipe, legs: Any) -> Run:
    """The run that is never stopped."""
    run = prepare(recipe, "blocks-whole", legs)
    legs.train(run)
    return run


def test_chunks_with_their_own_files_alone_end_on_the_bits_of_one_run(recipe: Recipe, whole: Run, legs: Any) -> None:
    run = prepare(legs.changed(recipe, chunks__count=5), "blocks-5", legs)
    plan, files = run.plan(), files_of(run)
    assert run.require("tokens.json")["order"] == "blocks"
    assert len(files) > 32
    assert plan.rows % run.recipe().training.batch_size > 0
    assert any(start < plan.steps_per_epoch < end for start, end in zip(plan.targets, plan.targets[1:], strict=False))
    for index, start in enumerate((0, *plan.targets[:-1]), 1):
        assert len(needed_for(run, start, plan.target(index))) < len(files)
        code, printed = alone(run, index, start, legs)
        assert code == 0, printed
    assert legs.losses(run) == legs.losses(whole)
    assert legs.final(run).meta.state == legs.final(whole).meta.state


def test_without_one_of_its_files_a_chunk_does_not_train(recipe: Recipe, legs: Any) -> None:
    run = prepare(legs.changed(recipe, chunks__count=4), "blocks-gone", legs)
    path = files_of(run)[min(needed_for(run, 0, run.plan().target(1)))]
    with without([path]):
        code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code != 0
    assert f"train/{os.path.basename(path)}: missing" in printed
    assert legs.steps(run) == []


@pytest.mark.slow
def test_a_chunk_that_must_go_further_back_fetches_more(recipe: Recipe, whole: Run, legs: Any) -> None:
    """Its newest checkpoint seems usable until it is read."""
    settings = {"chunks__count": 2, "chunks__checkpoint_every": 3, "chunks__wait_for_commit": True}
    run = prepare(legs.changed(recipe, **settings, chunks__keep={"last": 9}), "blocks-back", legs)
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0, printed
    first, target = run.plan().targets
    code, _ = legs.leg(legs.chunk, run.uri, 2, (), f"step:{target - 2}")
    assert code != 0, "killed"
    mid_chunk = [step for step in legs.steps(run) if step > first]
    assert needed_for(run, first, target) > needed_for(run, mid_chunk[0], target), "else nothing is shown"
    for step in mid_chunk:
        folder = Path(run.storage.key(f"runs/{run.name}/checkpoints/step-{step:08d}"))
        (weights,) = folder.glob("*/model.safetensors")
        weights.write_bytes(weights.read_bytes()[::-1])
    code, printed = alone(run, 2, first, legs)
    assert code == 0, printed
    assert f"checkpoint of step {mid_chunk[0]} is not used" in printed
    assert legs.final(run).meta.state == legs.final(whole).meta.state


@pytest.mark.slow
def test_the_learning_rate_finder_takes_its_own_files(recipe: Recipe, legs: Any) -> None:
    spec = {"start": 1e-5, "end": 10.0, "steps": 12, "smoothing": 0.5}
    run = prepare(legs.changed(recipe, training__lr_find=spec), "blocks-lr", legs)
    files, kept = files_of(run), needed_for(run, 0, 12)
    assert len(kept) < len(files)
    with without([path for number, path in enumerate(files) if number not in kept]):
        code, printed = legs.leg(legs.find_lr, run.uri)
    assert code == 0, printed
    assert run.require("lr_find.json")["learning_rate"] > 0


@pytest.mark.s3
def test_from_s3_a_chunk_downloads_its_own_files(s3_store: str, recipe: Recipe, whole: Run, legs: Any) -> None:
    run = prepare(legs.changed(recipe, store=s3_store, chunks__count=4), "blocks-s3", legs)
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0, printed
    _, manifest = trained.tokens_manifest(run)
    train = [name for name, _ in manifest.meta["files"]["train"]]
    kept = {train[number] for number in needed_for(run, 0, run.plan().target(1))}
    assert 0 < len(kept) < len(train)
    (attempt,) = run.attempts(1)
    assert attempt.bytes_received == sum(
        entry["size"]
        for name, entry in manifest.files.items()
        if name in kept or name.startswith(("tokenizer/", "eval/", "train/state", "train/dataset"))
    )
    assert legs.losses(run, run.plan().target(1)) == legs.losses(whole)[: run.plan().target(1)]
