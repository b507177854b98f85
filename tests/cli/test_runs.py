"""`baton runs`: list, tree and fork, from a run that was made here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.cli.app import app
from baton.recipe import load
from baton.runs.run import Run
from baton.source import prepare
from baton.store.storage import Storage

RECIPES = Path(__file__).parents[1] / "recipes"


def invoke(*arguments: str) -> Any:
    """Runs a command in this process."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A store with the run `base` at step 10 of 15, as its stages leave it; its weights are no weights."""
    monkeypatch.chdir(tmp_path)
    storage = Storage(str(tmp_path / "store"))
    run = Run(storage, "base")
    run.create(load.load(str(RECIPES / "scratch.yaml"), [f"store={storage.base_uri}", "chunks.count=3"]))
    run.put("data.json", {"digest": "d", "rows": 45})
    run.put("model.json", {"base_sha256": None})
    run.put("plan.json", {"rows": 36, "steps_per_epoch": 5, "num_steps": 15, "targets": [5, 10, 15]})
    for step in (5, 10):
        local = tmp_path / f"step-{step}"
        local.mkdir()
        (local / "trainer_state.json").write_text(json.dumps({"log_history": [], "max_steps": 15}))
        (local / "model.safetensors").write_bytes(b"weights")
        checkpoints = CheckpointStore(run)
        writer = checkpoints.open_writer(step)
        writer.send(str(local))
        meta = CheckpointMeta(digest=f"digest of {step}", chain="c", chunk=1, created="2026-11-21T10:00:00Z")
        checkpoints.commit(step, writer, meta)
    return storage


def test_a_fork_says_what_it_keeps_and_what_comes_next(store: Storage) -> None:
    said = invoke("runs", "fork", "base@5", "--store", "store", "--set", "training.learning_rate=5e-3")
    assert said.exit_code == 0, said.output
    assert "training.learning_rate: 0.01 → 0.005: the schedule continues at step 5 with the new peak" in said.output
    assert "next:   baton run store/runs/base-fork-1/recipe.yaml --run base-fork-1" in said.output
    run = Run(store, "base-fork-1")
    assert CheckpointStore(run).steps() == [5]
    assert run.require("fork.json") == {
        "parent": f"{store.base_uri}/runs/base",
        "step": 5,
        "digest": "digest of 5",
        "warm": True,
        "changed": {"training.learning_rate": [0.01, 0.005]},
    }
    assert not Path("base-fork-1.yaml").exists()
    loaded = prepare.load("store/runs/base-fork-1/recipe.yaml").localised()
    run.require_same(loaded)
    assert loaded.training.learning_rate == 5e-3
    said = invoke("runs", "fork", "base", "--store", "store")
    assert "nothing is changed: it will end on its parent's bits" in said.output
    assert CheckpointStore(Run(store, "base-fork-2")).steps() == [10], "the newest, and the next name"


def test_a_fork_answers_in_json(store: Storage) -> None:
    said = invoke("runs", "fork", f"{store.base_uri}/runs/base@10", "--run", "mine", "--output", "json")
    found = json.loads(said.stdout)
    assert {name: found[name] for name in ("run", "step", "digest", "warm", "changed")} == {
        "run": "mine",
        "step": 10,
        "digest": "digest of 10",
        "warm": True,
        "changed": {},
    }
    assert os.path.isfile(found["recipe"])
    said = invoke("runs", "fork", "base@10", "--store", "store", "--run", "other", "-o", "other.yaml")
    assert "next:   baton run other.yaml --run other" in said.output
    assert prepare.load("other.yaml").localised().name == "scratch"


def test_a_cold_fork_starts_from_the_weights_alone(store: Storage) -> None:
    said = invoke("runs", "fork", "base@10", "--store", "store", "--weights-only", "--set", "seed=3", "--run", "cold")
    assert said.exit_code == 0, said.output
    assert "weights alone, from step 0" in said.output
    run = Run(store, "cold")
    assert CheckpointStore(run).steps() == []
    base = run.recipe().model.base
    assert base is not None
    assert base.startswith(f"{store.base_uri}/runs/cold/start/")
    assert os.listdir(base) == ["model.safetensors"], "and not what the trainer keeps"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody@5"], "nobody/recipe.json does not exist"),
        (["base@x"], "is not RUN or RUN@STEP"),
        (["base@7"], "has no checkpoint of step 7; it has 5, 10"),
        (["base@5", "--set", "seed=3"], "seed: it decides the order of rows and every draw"),
        (["base@5", "--set", "training.batch_size=4"], "--weights-only to start at step 0"),
        (["base@5", "--run", "base"], "exists and is not a fork of this one"),
        (["base@5", "--run", "No Name"], "is not lower-case letters, digits and dashes"),
        (
            ["base@5", "--weights-only", "--set", "model.from_scratch.hidden_size=64"],
            "model.from_scratch.hidden_size cannot be",
        ),
    ],
    ids=["no run", "no step", "no checkpoint", "seed", "batch size", "own name", "bad name", "another model"],
)
def test_what_cannot_be_is_one_message(store: Storage, arguments: list[str], message: str) -> None:
    said = invoke("runs", "fork", *arguments, "--store", "store")
    assert said.exit_code == 2
    assert message in said.output
    assert "Traceback" not in said.output


def test_runs_are_listed_and_drawn(store: Storage) -> None:
    invoke("runs", "fork", "base@5", "--store", "store", "--set", "training.weight_decay=0.1", "--run", "child")
    invoke("runs", "fork", "child", "--store", "store", "--run", "grandchild")
    listed = json.loads(invoke("runs", "list", "--store", "store", "--output", "json").stdout)["runs"]
    assert [(row["name"], row["parent"], row["step"]) for row in listed] == [
        ("grandchild", "child", 5),
        ("child", "base", 5),
        ("base", None, 10),
    ]
    drawn = invoke("runs", "tree", "grandchild", "--store", "store").stdout.splitlines()
    assert drawn[0].startswith("base  interrupted 10/15")
    assert drawn[1].startswith("└── child  interrupted 5/15  fork at step 5; weight_decay 0.1")
    assert drawn[2].startswith("    └── grandchild  interrupted 5/15  fork at step 5")
    for number in range(2):
        trial = invoke("runs", "fork", "base@10", "--store", "store", "--run", f"trial-{number}", "--weights-only")
        assert trial.exit_code == 0, trial.output
        run = Run(store, f"trial-{number}")
        store.remove(run.path("fork.json"))
        run.put("trial.json", {"sweep": "s", "id": f"t00{number}", "values": {}})
        run.put("recipe.json", {**run.require("recipe.json"), "created": f"2027-01-0{number + 1}"})
    drawn = invoke("runs", "tree", "--store", "store").stdout.splitlines()
    assert [line.split("  ")[0] for line in drawn if "t00" in line or line.startswith("sweep")] == [
        "sweep s",
        "├── trial-0",
        "└── trial-1",
    ]
    table = invoke("runs", "list", "--store", "store").stdout
    assert "child: fork at step 5" in table
    missing = invoke("runs", "tree", "nobody", "--store", "store")
    assert missing.exit_code == 2
    assert "nobody does not exist" in missing.output
