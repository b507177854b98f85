"""What a chunk's checkpoints send, as the server counts it: from the third on what changed, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError
from baton.recipe.recipe import Recipe
from tests.conftest import S3Server
from tests.support import tiny
from tests.support.counting import Counter
from tests.train.resuming import Chunks

TRAINING = {"optimizer": "adamw_torch", "max_steps": 6, "learning_rate": 0.01}
CHUNKS = {"keep": {"last": 9}, "wait_for_commit": True, "checkpoint_every": 1}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"adapter": {"r": 64, "target_modules": "all-linear"}},
    "frozen layers": {"training": {**TRAINING, "trainable": {"last_layers": 1, "patterns": ["embed_tokens"]}}},
}


def recipe(base: str, kind: str) -> Recipe:
    """Returns a recipe of six steps with a checkpoint after each."""
    sections = {"training": TRAINING, "chunks": CHUNKS, "evaluation": {"samples": 0}, **KINDS[kind]}
    return tiny.recipe(base, **sections)


@pytest.fixture
def counter(s3_server: S3Server, s3_store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """What stands before the session's server and counts."""
    counter = Counter(s3_server.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", counter.endpoint)
    yield counter
    counter.stop()


@pytest.fixture
def make(tiny_base: str, tmp_path: Path) -> Callable[..., Chunks]:
    """Returns what makes a run in a folder, or in another store."""
    made_of: list[str] = []

    def made(kind: str, targets: tuple[int, ...] = (), store: str | None = None) -> Chunks:
        made_of.append(kind)
        return Chunks(recipe(tiny_base, kind), tmp_path, f"run-{len(made_of)}", targets, store=store)

    return made


def changed(store: CheckpointStore, step: int) -> int:
    """Returns the bytes of a checkpoint's files that are not those of both before it."""
    ours, *before = (store.read(at) for at in (step, step - 1, step - 2))
    assert ours
    old = [{name: entry["sha256"] for name, entry in theirs.manifest.files.items()} for theirs in before if theirs]
    return sum(
        entry["size"]
        for name, entry in ours.manifest.files.items()
        if any(theirs.get(name) != entry["sha256"] for theirs in old)
    )


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LoRA", "frozen layers"])
def test_only_what_changed_is_sent(kind: str, make: Callable[..., Chunks], counter: Counter, s3_store: str) -> None:
    run = make(kind, (3, 6), s3_store)
    run.train_all()

    assert run.steps == [1, 2, 3, 4, 5, 6]
    for step in (3, 4, 5, 6):  # 4 is the first of another process
        sent, least = counter.sent(f"/checkpoints/step-{step:08d}/"), changed(run.store, step)
        assert least <= sent <= 1.05 * least, f"step {step}: {sent:,} bytes sent, {least:,} had changed"
    for step in (1, 2):
        assert counter.sent(f"/checkpoints/step-{step:08d}/") >= run.at(step).bytes
    assert counter.copies
    assert all(run.store.verify(run.at(step)) == [] for step in run.steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_from_copies_to_the_same_bits(kind: str, make: Callable[..., Chunks]) -> None:
    whole, parts = make(kind), make(kind, (4, 6))
    whole.train_all()
    parts.train_all()

    resumed_from = parts.at(4).manifest.files
    copied = {name for name, entry in resumed_from.items() if "origin" in entry}
    assert copied & {"tokenizer.json", "model-00001-of-00002.safetensors"}
    assert parts.at().meta.restored.step == 4
    assert parts.at().meta.state == whole.at().meta.state


def test_a_resume_without_its_weights_ends_on_other_bits(make: Callable[..., Chunks]) -> None:
    """Negative control."""
    whole, run = make("frozen layers"), make("frozen layers", (4, 6))
    whole.train_all()
    run.train(1)
    run.train(2, leave_out=("weights",))
    assert run.at().meta.state["weights"] != whole.at().meta.state["weights"]


def test_frozen_weights_are_in_files_of_their_own(make: Callable[..., Chunks]) -> None:
    run = make("frozen layers")
    run.train_all()

    third, sixth = run.at(3).manifest.files, run.at(6).manifest.files
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert [third[name]["sha256"] == sixth[name]["sha256"] for name in names] == [True, False]
    loaded = AutoModelForCausalLM.from_pretrained(run.store.uri(run.at()))
    for name, weight in run.trainer.model.named_parameters():
        assert loaded.get_parameter(name).equal(weight.detach())


def test_damage_of_what_checkpoints_share_is_found_and_passed_over(make: Callable[..., Chunks], tmp_path: Path) -> None:
    whole, run = make("frozen layers"), make("frozen layers", (4, 6))
    whole.train_all()
    run.train(1)
    shared = run.at(4).manifest.path(run.store.prefix(4), "model-00001-of-00002.safetensors")
    with open(run.run.storage.key(shared), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")

    damaged = [step for step in run.steps if run.store.verify(run.at(step))]
    assert damaged == [2, 4], "each second one, and never two that follow each other"
    lead = run.train(2)

    assert lead.start_step == 3
    assert run.at().meta.state == whole.at().meta.state
    assert all(run.store.verify(run.at(step)) == [] for step in (3, 5, 6))
    assert "origin" not in run.at(5).manifest.files["model-00001-of-00002.safetensors"]
    with pytest.raises(DamagedError):
        run.store.fetch(run.at(2), str(tmp_path / "read"))
    shutil.rmtree(tmp_path / "read", ignore_errors=True)
