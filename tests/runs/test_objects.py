"""The registry of a run's objects: each name has one kind, and what is obeyed can be made again."""

from __future__ import annotations

import pytest

from baton.runs import objects
from baton.runs.objects import OBJECTS, Mend

NAMES = {
    "plan.json": "plan.json",
    "proof/chunk-003.json": "proof/chunk-*.json",
    "proof/restored-00000012.json": "proof/restored-*.json",
    "skips/step-00000012.json": "skips/step-*.json",
    "ends/end-001.json": "ends/end-*.json",
    "scores/chunk-001.json": "scores/chunk-*.json",
    "checkpoints/step-00000004": "checkpoints/step-*",
    "records/train-chunk-001-1795732895106-6771983726bf.json": "records/*.json",
    "export": "export",
    "export-0a1b2c3d": "export-*",
    "exports/gguf": "exports/*",
    "data/03a8/tokens": "data/*/tokens*",
    "data/03a8/tokens-0123": "data/*/tokens*",
    "tensorboard/a/b": "tensorboard/**",
    "seals/000001.json": "seals/*.json",
    "plan.json.lease": None,
    "records/a/b.json": None,
    "other.json": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_has_one_kind(name: str) -> None:
    matching = [each.pattern for each in OBJECTS if each.expression.fullmatch(name)]
    assert matching == [pattern for pattern in [NAMES[name]] if pattern]
    found = objects.find(name)
    assert (found.pattern if found else None) == NAMES[name]


def test_what_is_obeyed_has_a_writer_and_comes_back() -> None:
    for each in OBJECTS:
        if each.readers:
            assert each.writers, each.pattern
            assert each.mend is not Mend.NOTE, each.pattern


def test_a_fork_carries_what_it_did() -> None:
    names = ("data.json", "model.json", "code.json", "split.json", "tokens.json", "lr_find.json", "micro_batch.json")
    assert set(objects.CARRIED) == set(names)
    assert objects.IDENTITY == ("data.json", "model.json", "code.json")
