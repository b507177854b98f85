"""`evaluation.production: accepted`: the model that the last retraining promoted, in the run's own store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.evaluate import evaluate
from baton.recipe import load
from baton.runs import lineage
from baton.runs.outcomes import AcceptedModel
from baton.runs.run import Run
from baton.store.storage import Storage


def _saved(folder: Path, kind: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [kind]}), encoding="utf-8")
    return str(folder)


def test_the_newest_accepted_model_is_the_one_in_use(scratch_recipe: dict[str, Any], tmp_path: Path) -> None:
    document = {**scratch_recipe, "store": {"uri": str(tmp_path / "store")}, "evaluation": {"production": "accepted"}}
    recipe = load.validate(document, origin="r.yaml")
    storage = Storage(recipe.store.uri)
    run = Run(storage, "r")
    found = evaluate.find_production(run, recipe, str(tmp_path))
    assert found == (None, "accepted: there is none yet")

    for number, name in enumerate(("one", "two")):
        model = _saved(tmp_path / name, "LlamaForCausalLM")
        lineage.accept(storage, "tiny", number, AcceptedModel(run=name, model_uri=model))
    found = evaluate.find_production(run, recipe, str(tmp_path))
    assert found == (str(tmp_path / "two"), "accepted, model 2 of tiny")

    phase = recipe.model_copy(update={"name": "tiny-sft"})
    run.put("retrain.json", {"model": "tiny"})
    assert evaluate.find_production(run, phase, str(tmp_path)) == found

    other = _saved(tmp_path / "three", "LlamaForSequenceClassification")
    lineage.accept(storage, "tiny", 2, AcceptedModel(run="three", model_uri=other))
    with pytest.raises(UserError, match=r"'accepted' is a LlamaForSequenceClassification"):
        evaluate.find_production(run, recipe, str(tmp_path))
