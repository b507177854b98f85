"""Each decision of a retraining, at the level of functions: what has changed, whose turn it is, what is settled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint import seals
from baton.errors import BatonError, DamagedError
from baton.recipe import load, parameters
from baton.recipe.recipe import Recipe
from baton.retrain import (
    RetrainDecision,
    RetrainLock,
    check_for_changes,
    data_digest,
    promote_or_keep,
    recipe_digest,
    release_lock,
)
from baton.runs import lineage, objects
from baton.runs.run import Run
from baton.signing import KEY_FILE, SIGNED_BY, SignatureError, Signer, stamped
from baton.store import bundle
from baton.store.storage import Storage

SIGNER = Signer.new("ed25519")
HELD = {"words": "loss 2 is <= production = 2.1", "held": True}
BROKEN = {"words": "loss 3 is not <= production = 2.1", "held": False}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    return path


@pytest.fixture
def document(store: str, rows: Path) -> dict[str, Any]:
    """A recipe as plain values."""
    return {
        "name": "tiny",
        "store": {"uri": store},
        "model": {"base": "org/model"},
        "data": {"source": [str(rows)]},
        "evaluation": {"production": "accepted", "gate": {"loss": "<= production"}},
        "tracking": {"mlflow": None},
    }


def _recipe(document: dict[str, Any], **sections: Any) -> Recipe:
    return load.validate({**document, **sections}, origin="test")


def _look(recipe: Recipe, owner: str = "first") -> RetrainDecision:
    return check_for_changes(recipe, owner)


def _trained(
    recipe: Recipe, found: RetrainDecision, tmp_path: Path, *, passed: bool = True, data: str = "split-1"
) -> Storage:
    """Leaves what a run leaves that was judged and exported."""
    storage = Storage(recipe.store.uri)
    run = Run(storage, found.run)
    run.put("data.json", {"digest": data})
    lines = [HELD if passed else BROKEN]
    run.put("evaluation.json", {"summary": "loss 3 → 2", "gate": {"passed": passed, "lines": lines}})
    if passed:
        folder = tmp_path / f"export-{found.run}"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(found.run)
        manifest, _ = bundle.publish(
            storage, run.path("export"), str(folder), kind="model", meta={"digest": f"state-{found.run}"}
        )
        run.put("export.json", {"model_uri": storage.uri(manifest.path(run.path("export")))})
    return storage


def _retrained(recipe: Recipe, tmp_path: Path, owner: str, **trained: Any) -> str:
    found = _look(recipe, owner)
    assert found.decision == "train"
    _trained(recipe, found, tmp_path, **trained)
    state = promote_or_keep(f"{recipe.store.uri}/runs/{found.run}")
    release_lock(recipe.name, recipe.store.uri, owner, None)
    return state


def _outcome(storage: Storage, owner: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(storage.read(f"models/tiny/outcomes/{owner}.json"))
    return found


def test_the_first_is_trained_and_promoted_and_the_second_has_nothing_to_do(
    document: dict[str, Any], tmp_path: Path
) -> None:
    recipe = _recipe(document)
    assert _retrained(recipe, tmp_path, "first") == "promoted"
    storage = Storage(recipe.store.uri)
    in_use = lineage.newest_accepted(storage, "tiny")
    assert in_use.number == 1
    assert in_use.model is not None
    assert in_use.model.learnt == ["split-1"]
    assert in_use.model.digest == f"state-{in_use.model.run}"
    kept = _outcome(storage, "first")
    assert (kept["state"], kept["words"], kept["model_uri"]) == ("promoted", "model 1 of tiny", in_use.model_uri)

    found = _look(recipe, "second")
    assert found.decision == "unchanged"
    assert in_use.model.run in found.words
    assert _outcome(storage, "second")["state"] == "unchanged"
    assert RetrainLock(storage, "tiny", "second")._ours() is None


def test_an_override_is_a_change_of_the_recipe_and_the_recipes_own_values_are_none(
    document: dict[str, Any], tmp_path: Path
) -> None:
    recipe = _recipe(document)
    assert _retrained(recipe, tmp_path, "first") == "promoted"
    own = parameters.given_parameters(
        store=recipe.store.uri, base_model="org/model", seed=0, batch_size=recipe.training.batch_size
    )
    assert _look(parameters.apply_parameters(recipe, own, {}), "second").decision == "unchanged"
    found = _look(parameters.apply_parameters(recipe, own, {"training.weight_decay": 0.5}), "third")
    assert (found.decision, found.words[:14]) == ("train", "recipe changed")
    assert load.loads(found.recipe).training.weight_decay == 0.5


def test_other_content_is_trained_on_and_other_names_and_times_are_not(
    document: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    recipe = _recipe(document)
    _retrained(recipe, tmp_path, "first")
    os.utime(rows, (1, 1))
    assert _look(recipe, "touched").decision == "unchanged"
    moved = tmp_path / "moved.jsonl"
    rows.rename(moved)
    renamed = _recipe(document, data={"source": [str(moved)]})
    assert _look(renamed, "moved").decision == "unchanged"
    moved.write_text(moved.read_text() + '{"text": "three"}\n', encoding="utf-8")
    found = _look(renamed, "grown")
    assert found.decision == "train"
    assert found.words.startswith("data changed since tiny-")


def test_another_recipe_is_trained_and_one_that_only_moves_or_cuts_otherwise_is_not(
    document: dict[str, Any], tmp_path: Path
) -> None:
    _retrained(_recipe(document), tmp_path, "first")
    unmoved = {"chunks": {"count": 3}, "resources": {"retries": 5}, "retrain": {"concurrency": "drop"}}
    assert _look(_recipe(document, **unmoved), "same").decision == "unchanged"
    found = _look(_recipe(document, training={"learning_rate": 3e-4}), "other")
    assert found.decision == "train"
    assert found.words.startswith("recipe changed since tiny-")


def test_what_the_gate_rejects_leaves_the_model_in_use_and_is_not_trained_again(
    document: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    recipe = _recipe(document)
    _retrained(recipe, tmp_path, "first")
    storage = Storage(recipe.store.uri)
    before = lineage.newest_accepted(storage, "tiny")
    rows.write_text('{"text": "poison"}\n', encoding="utf-8")
    assert _retrained(recipe, tmp_path, "second", passed=False) == "rejected"
    assert lineage.newest_accepted(storage, "tiny") == before
    kept = _outcome(storage, "second")
    assert (kept["state"], kept["words"]) == ("rejected", BROKEN["words"])
    assert kept["gate"] == [BROKEN]
    assert _look(recipe, "third").decision == "unchanged"
    milder = _recipe(document, evaluation={**document["evaluation"], "gate": {"loss": "<= production * 2"}})
    assert _look(milder, "fourth").decision == "train"


def test_a_run_that_broke_off_goes_on_under_its_name(document: dict[str, Any]) -> None:
    recipe = _recipe(document)
    first = _look(recipe, "first")
    release_lock("tiny", recipe.store.uri, "first", "Task train-chunk failed.")
    assert _outcome(Storage(recipe.store.uri), "first")["words"] == "Task train-chunk failed."
    assert _look(recipe, "second") == first


def test_while_one_is_under_way_the_second_is_dropped(document: dict[str, Any], tmp_path: Path) -> None:
    recipe = _recipe(document, retrain={"concurrency": "drop"})
    first = _look(recipe, "first")
    assert _look(recipe, "second").decision == "busy"
    release_lock("tiny", recipe.store.uri, "second", None)  # its exit handler must not end the turn of the first
    storage = _trained(recipe, first, tmp_path)
    assert RetrainLock(storage, "tiny", "first")._ours()
    assert promote_or_keep(f"{recipe.store.uri}/runs/{first.run}") == "promoted"
    assert _outcome(storage, "second")["state"] == "busy"


def test_on_from_the_accepted_model_with_its_rows_until_the_recipe_changes(
    document: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    recipe = _recipe(document, retrain={"start": "accepted", "replay": 0.25})
    _retrained(recipe, tmp_path, "first")
    storage = Storage(recipe.store.uri)
    for number, text in enumerate(("three", "four"), 2):
        in_use = lineage.newest_accepted(storage, "tiny")
        rows.write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
        found = _look(recipe, text)
        changed = load.loads(found.recipe)
        assert changed.model.base == in_use.model_uri
        assert changed.retrain.learnt == [f"split-{before}" for before in range(1, number)]
        _trained(recipe, found, tmp_path, data=f"split-{number}")
        promote_or_keep(f"{recipe.store.uri}/runs/{found.run}")
        release_lock("tiny", recipe.store.uri, text, None)
    other = _recipe(document, retrain={"start": "accepted"}, seed=8)
    changed = load.loads(_look(other, "other").recipe)
    assert (changed.model.base, changed.retrain.learnt) == ("org/model", [])


def test_one_of_two_models_that_were_judged_against_the_same_is_accepted(
    document: dict[str, Any], tmp_path: Path
) -> None:
    """The one that was asleep for longer than its turn was good for comes too late."""
    asleep = _recipe(document)
    late = _look(asleep, "late")
    storage = _trained(asleep, late, tmp_path)
    other = _recipe(document, seed=8, retrain={"expires": "1s"})
    assert RetrainLock(storage, "tiny", "next").acquire(wait=False, expires_s=-1)
    following = _look(other, "next")
    _trained(other, following, tmp_path)
    assert promote_or_keep(f"{asleep.store.uri}/runs/{following.run}") == "promoted"
    with pytest.raises(BatonError, match=f"meanwhile run '{following.run}' was accepted"):
        promote_or_keep(f"{asleep.store.uri}/runs/{late.run}")
    in_use = lineage.newest_accepted(storage, "tiny")
    assert in_use.model is not None
    assert (in_use.number, in_use.model.run) == (1, following.run)
    assert promote_or_keep(f"{asleep.store.uri}/runs/{following.run}") == "promoted"
    assert lineage.newest_accepted(storage, "tiny").number == 1


def test_an_export_that_is_damaged_is_not_promoted(document: dict[str, Any], tmp_path: Path) -> None:
    recipe = _recipe(document)
    found = _look(recipe)
    storage = _trained(recipe, found, tmp_path)
    uri = Run(storage, found.run).require("export.json")["model_uri"]
    storage.write(f"{uri.removeprefix(storage.uri() + '/')}/model.safetensors", b"x" * len(found.run))
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        promote_or_keep(f"{recipe.store.uri}/runs/{found.run}")
    assert lineage.newest_accepted(storage, "tiny").number == 0


def test_files_that_look_as_before_are_not_read(
    document: dict[str, Any], rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _recipe(document)
    storage = Storage(recipe.store.uri)
    digest = data_digest(recipe, storage)
    read = []
    monkeypatch.setattr(Storage, "sha256", lambda self, path: read.append(path))
    assert data_digest(recipe, storage) == digest
    assert read == []
    rows.write_text('{"text": "one"}\n{"text": "2wo"}\n', encoding="utf-8")
    with pytest.raises(TypeError):
        data_digest(recipe, storage)
    assert read == ["rows.jsonl"]


@pytest.mark.s3
def test_objects_are_told_by_their_mark(document: dict[str, Any], s3_store: str) -> None:
    storage = Storage(s3_store)
    storage.write("rows/a.jsonl", b'{"text": "one"}\n')
    recipe = _recipe(document, store={"uri": s3_store}, data={"source": [f"{s3_store}/rows"]})
    before = data_digest(recipe, storage)
    seen = json.loads(storage.read("models/tiny/seen.json"))
    assert list(seen) == [f"{s3_store}/rows/a.jsonl"]
    storage.write("rows/b.jsonl", b'{"text": "two"}\n')
    assert data_digest(recipe, storage) != before
    storage.remove("rows/b.jsonl")
    storage.write("rows/c.jsonl", b'{"text": "one"}\n')
    storage.remove("rows/a.jsonl")
    assert data_digest(recipe, storage) == before


@pytest.mark.parametrize("seen", [b"{", b'{"%s": 3}'], ids=["torn", "another thing"])
def test_what_was_seen_and_cannot_be_read_is_looked_at_again(seen: bytes, document: dict[str, Any], rows: Path) -> None:
    recipe = _recipe(document)
    storage = Storage(recipe.store.uri)
    before = data_digest(recipe, storage)
    path = f"models/{recipe.name}/seen.json"
    noted = storage.read(path)
    storage.write(path, seen % str(rows).encode() if b"%s" in seen else seen)
    assert data_digest(recipe, storage) == before
    assert storage.read(path) == noted


def test_a_source_counts_with_what_the_recipe_says_of_it(document: dict[str, Any], rows: Path) -> None:
    plain = _recipe(document)
    storage = Storage(plain.store.uri)
    heavier = _recipe(document, data={"source": [{"uri": str(rows), "weight": 2}]})
    assert data_digest(plain, storage) != data_digest(heavier, storage)
    assert recipe_digest(plain) == recipe_digest(heavier)


def _with_key(has_key: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_key:
        (folder / "key").write_bytes(SIGNER.pem())
        monkeypatch.setenv(KEY_FILE, str(folder / "key"))
        monkeypatch.setenv(SIGNED_BY, SIGNER.public.line)


def _changed(storage: Storage, path: str, target: str = "", **values: Any) -> None:
    document = json.loads(storage.read(path))
    storage.write(target or path, json.dumps({**document, **values}).encode())


FIRST, SECOND = "models/tiny/accepted/000001.json", "models/tiny/accepted/000002.json"
ACCEPTS: dict[str, Callable[[Storage], None]] = {
    "another address": lambda storage: _changed(storage, FIRST, model_uri="planted"),
    "no signature": lambda storage: _changed(storage, FIRST, model_uri="planted", signature=None),
    "a newer one": lambda storage: _changed(storage, FIRST, SECOND, model_uri="planted"),
    "a newer one, signed elsewhere": lambda storage: storage.write(
        SECOND, json.dumps(stamped(FIRST, {"run": "r", "model_uri": "planted"}, SIGNER.public)).encode()
    ),
}


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("planted", ACCEPTS)
def test_a_model_that_no_retraining_accepted(
    planted: str, has_key: bool, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(SIGNER.pem())
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    _with_key(has_key, tmp_path, monkeypatch)
    recipe = _recipe(document)
    found = _look(recipe)
    with seals.stage(Run(Storage(recipe.store.uri), found.run), objects.EXPORT):
        storage = _trained(recipe, found, tmp_path)
    assert promote_or_keep(f"{recipe.store.uri}/runs/{found.run}") == "promoted"
    release_lock(recipe.name, recipe.store.uri, "first", None)
    assert lineage.newest_accepted(storage, "tiny").number == 1
    ACCEPTS[planted](storage)
    if not has_key:
        assert lineage.newest_accepted(storage, "tiny").model_uri == "planted"
        return
    with pytest.raises(SignatureError, match=r"accepted/00000[12]\.json is refused: it"):
        _look(recipe, "second")


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("planted", ["a verdict", "a note", "nothing"])
def test_a_promotion_obeys_its_run_alone(
    planted: str, has_key: bool, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_key(has_key, tmp_path, monkeypatch)
    recipe = _recipe(document)
    found = _look(recipe)
    run = Run(Storage(recipe.store.uri), found.run)
    with seals.stage(run, objects.SPLIT if planted == "a verdict" else objects.EXPORT):
        run.put("origins.json", {})
        if planted != "a verdict":
            _trained(recipe, found, tmp_path)
    if planted == "a verdict":
        _trained(recipe, found, tmp_path)
    if planted == "a note":
        _changed(run.storage, run.path("retrain.json"), model="other")
    if has_key and planted != "nothing":
        with pytest.raises(SignatureError, match=r"(evaluation|retrain)\.json is refused"):
            promote_or_keep(run.uri)
        return
    assert promote_or_keep(run.uri) == "promoted"
    assert lineage.newest_accepted(run.storage, "other" if planted == "a note" else "tiny").number == 1


def test_own_code_counts_by_its_content(document: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def one(): ...\n")
    recipe = _recipe(document, hooks={"source": str(own)})
    before = recipe_digest(recipe)
    own.write_text("def one(): return 1\n")
    assert recipe_digest(recipe) != before
