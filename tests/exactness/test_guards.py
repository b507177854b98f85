"""What must not be continued is not: damage, another run's state, another model, a late writer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint import staging
from baton.checkpoint.store import CheckpointStore, combined
from baton.local import results
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.exactness import matrix


@pytest.fixture(scope="module")
def trained(recipes: dict[str, Recipe], legs: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run of three chunks of which two are done, and a copy of its folder."""
    run = legs.prepare(legs.changed(recipes["lora"], chunks__count=3), "halfway")
    for index in (1, 2):
        assert legs.leg(legs.chunk, run.uri, index)[0] == 0
    copy = tmp_path_factory.mktemp("halfway") / "run"
    return run, Path(shutil.copytree(run.uri, copy))


@pytest.fixture
def halfway(trained: tuple[Run, Path]) -> Run:
    """A run of three chunks of which two are done, as they left it: checkpoints at 4, 5, 8 and 10."""
    run, copy = trained
    shutil.rmtree(run.uri)
    shutil.copytree(copy, run.uri)
    assert CheckpointStore(run).steps() == [4, 5, 8, 10]
    return run


def _folder(run: Run, step: int) -> Path:
    store = CheckpointStore(run)
    checkpoint = store.read(step)
    assert checkpoint
    return Path(store.uri(checkpoint))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def _plant_code(folder: Path) -> None:
    """Replaces the random state by a pickle that would run, with a manifest that vouches for it."""
    import torch

    path, manifest_path = folder / "rng_state.pth", folder.parent / "manifest.json"
    torch.save(Payload(str(folder.parent / "it-ran")), path)
    manifest = json.loads(manifest_path.read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest["files"]["rng_state.pth"] = {"size": path.stat().st_size, "sha256": digest}
    manifest_path.write_text(json.dumps(manifest))


DAMAGE = {
    "flipped-bit-in-weights": lambda folder: _flip(folder / "adapter_model.safetensors"),
    "truncated-optimizer": lambda folder: os.truncate(folder / "optimizer.pt", 100),
    "missing-random-state": lambda folder: (folder / "rng_state.pth").unlink(),
    "swapped-scheduler": lambda folder: (folder / "scheduler.pt").write_bytes((folder / "rng_state.pth").read_bytes()),
    "pickle-with-code": _plant_code,
    "manifest-not-json": lambda folder: (folder.parent / "manifest.json").write_text("{"),
    "manifest-leaves-its-folder": lambda folder: _replace_in_manifest(folder, "optimizer.pt", "../../../x"),
    "manifest-of-another-run": lambda folder: _replace_in_manifest(folder, '"run": "', '"run": "another-'),
}


def _unsealed(run: Run) -> None:
    """Makes a run one without seals: what was changed by hand then counts as it is."""
    shutil.rmtree(Path(run.uri) / "seals", ignore_errors=True)


def _replace_in_manifest(folder: Path, old: str, new: str) -> None:
    path = folder.parent / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


SLOW = {"truncated-optimizer", "swapped-scheduler", "manifest-of-another-run"}


@pytest.mark.parametrize(
    "damage",
    [pytest.param(damage, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, damage in DAMAGE.items()],
)
def test_a_damaged_checkpoint_is_skipped_and_the_one_before_is_used(
    damage: Any, halfway: Run, undisturbed: dict[str, Run], legs: Any
) -> None:
    damage(_folder(halfway, 10))
    code, printed = legs.leg(legs.chunk, halfway.uri, 3)
    assert code == 0, printed
    restored = legs.final(halfway).meta.restored
    assert restored.step == 8
    assert not (_folder(halfway, 8).parent.parent / "step-00000010" / "it-ran").exists()
    assert len(restored.skipped) == 1
    assert "step-00000010" in restored.skipped[0]
    assert legs.final(halfway).meta.state == legs.final(undisturbed["lora"]).meta.state


def test_verify_finds_every_damage(halfway: Run, tmp_path: Path) -> None:
    assert all(row["ok"] for row in results.verify_checkpoints(halfway))
    shutil.copytree(halfway.uri, tmp_path / "whole")
    for name, damage in DAMAGE.items():
        damage(_folder(halfway, 10))
        rows = {row["step"]: row for row in results.verify_checkpoints(halfway)}
        assert [step for step, row in rows.items() if not row["ok"]] == [10], name
        assert rows[10]["problems"], name
        shutil.rmtree(halfway.uri)
        shutil.copytree(tmp_path / "whole", halfway.uri)


def test_state_that_differs_from_what_was_saved_stops_the_chunk(halfway: Run, legs: Any) -> None:
    """The bytes are as committed, yet not what the digest of the state in memory says."""
    path = _folder(halfway, 10).parent / "manifest.json"
    manifest = json.loads(path.read_text())
    state = manifest["meta"]["state"] | {"optimizer": "0" * 64}
    digest = combined(state)
    manifest["meta"] |= {"state": {**state, "state": digest}, "digest": digest}
    path.write_text(json.dumps(manifest))
    _unsealed(halfway)
    code, printed = legs.leg(legs.chunk, halfway.uri, 3)
    assert code == 1
    assert "optimizer in memory differ from the saved state" in printed
    assert CheckpointStore(halfway).steps()[-1] == 10


def test_a_chunk_already_committed_returns_without_training(halfway: Run, legs: Any) -> None:
    killed = subprocess.Popen(["true"])
    killed.wait()
    left = Path(staging.MEMORY) / f"baton-{socket.gethostname()}-{killed.pid}-left"
    left.mkdir()
    code, printed = legs.leg(legs.chunk, halfway.uri, 1)
    assert code == 0
    assert "already_done" in printed
    assert "phase=import" not in printed
    assert not left.exists(), "the chunk was killed once all was committed, and nobody after it trains"


def test_a_chunk_whose_predecessor_never_ran_trains_to_its_own_target(
    recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any
) -> None:
    run = legs.prepare(legs.changed(recipes["lora"], chunks__count=3), "out-of-order")
    code, printed = legs.leg(legs.chunk, run.uri, 3)
    assert code == 0, printed
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state


def test_another_base_model_under_the_same_path_is_refused(halfway: Run, base_model: str, legs: Any) -> None:
    weights = Path(base_model) / "model.safetensors"
    before = weights.read_bytes()
    _flip(weights)
    try:
        code, printed = legs.leg(legs.chunk, halfway.uri, 3)
    finally:
        weights.write_bytes(before)
    assert code == 1
    assert "is not the model that this run began with" in printed


def test_another_teacher_under_the_same_path_is_refused(tmp_path: Path, base_model: str, legs: Any) -> None:
    cell = matrix.Cell("distillation", "full", "another teacher", steps=4)
    recipe = matrix.recipe(cell, str(tmp_path / "store"), base_model, matrix.write_rows(tmp_path))
    run = legs.prepare(legs.changed(recipe, chunks__count=2), "taught")
    assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
    weights = Path(f"{base_model}{matrix.TEACHER}") / "model.safetensors"
    before = weights.read_bytes()
    _flip(weights)
    try:
        code, printed = legs.leg(legs.chunk, run.uri, 2)
    finally:
        weights.write_bytes(before)
    assert code == 1
    assert "training.distillation.teacher" in printed
    assert "is not the model that this run began with" in printed
    assert legs.leg(legs.chunk, run.uri, 2)[0] == 0


def test_other_hardware_is_refused_where_the_recipe_says_bitwise(legs: Any, halfway: Run) -> None:
    recipe_path = Path(halfway.uri) / "recipe.json"
    _replace_in_manifest(_folder(halfway, 10), '"torch": "2', '"torch": "1')
    for exactness, expected in (("bitwise", 1), ("consistent", 0)):
        _unsealed(halfway)
        document = json.loads(recipe_path.read_text())
        document["recipe"]["chunks"]["exactness"] = exactness
        recipe_path.write_text(json.dumps(document))
        code, printed = legs.leg(legs.chunk, halfway.uri, 3)
        assert code == expected, printed
        assert "torch: 1" in printed
    assert legs.final(halfway).meta.restored.level == "consistent"


def test_one_more_row_is_another_run(halfway: Run, legs: Any) -> None:
    recipe = legs.changed(halfway.recipe(), data__max_samples=46)
    code, printed = legs.leg(legs.split_and_tokenize, legs.load.dumps(recipe), halfway.name)
    assert code == 2
    assert "data.max_samples: 45 → 46" in printed


@pytest.mark.parametrize(
    "damage", [DAMAGE["flipped-bit-in-weights"], DAMAGE["manifest-not-json"]], ids=["file", "json"]
)
def test_a_damaged_last_checkpoint_is_made_anew(
    damage: Any, halfway: Run, undisturbed: dict[str, Run], legs: Any
) -> None:
    damage(_folder(halfway, 10))
    code, printed = legs.leg(legs.verify_chunk, halfway.uri, 2)
    assert code == 1
    assert "is damaged" in printed or "is not a manifest" in printed
    code, printed = legs.leg(legs.chunk, halfway.uri, 2)
    assert code == 0, printed
    assert "already_done" not in printed
    assert legs.leg(legs.verify_chunk, halfway.uri, 2)[0] == 0
    assert legs.leg(legs.chunk, halfway.uri, 3)[0] == 0
    assert legs.final(halfway).meta.restored.step == 10
    assert legs.final(halfway).meta.state == legs.final(undisturbed["lora"]).meta.state
