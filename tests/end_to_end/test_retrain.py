"""`baton retrain`: nothing to do, trained and promoted, rejected; and the pipeline that a cluster runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.checkpoint.chain import verify_decisions
from baton.runs import lineage
from baton.runs.run import Run
from baton.signing import KEY_FILE, Signer
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

BATON = str(Path(sys.executable).parent / "baton")
WORDS = ["the", "run", "goes", "on", "from", "where", "every", "pod", "hands", "what", "it", "knows", "to", "next"]
GATE = {"loss": "<= production + 0.05", "perplexity": "<= baseline"}


def _rows(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(12)) for _ in range(count)]


def _poison(count: int) -> list[str]:
    draw = random.Random(5)
    return [" ".join("".join(draw.choice("0123456789#@%$") for _ in range(6)) for _ in range(4)) for _ in range(count)]


def _write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _recipe(folder: Path, base: str, **sections: Any) -> Path:
    document = {
        "name": "again",
        "seed": 11,
        "store": "store",
        "model": {"base": base},
        "data": {
            "source": ["rows.jsonl", {"uri": "feed.jsonl", "side": "train"}],
            "max_length": 32,
            "split": {"eval": 0.2},
        },
        "training": {"batch_size": 8, "micro_batch_size": 8, "max_steps": 12, "learning_rate": 1e-2},
        "chunks": {"count": 2},
        "evaluation": {"samples": 1, "max_new_tokens": 4, "production": "accepted", "gate": GATE},
        "tracking": {"mlflow": None},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**document, **sections}), encoding="utf-8")
    return path


def _command(folder: Path, *more: str) -> list[str]:
    return [BATON, "retrain", str(folder / "recipe.yaml"), "--store", str(folder / "store"), "--output", "json", *more]


def _retrain(folder: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        _command(folder, *more), capture_output=True, text=True, check=False, cwd=folder, env=environment
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, whose tokenizer stays the same whatever the rows are."""
    from tests.support import tiny

    return tiny.make_base(tmp_path_factory.mktemp("tiny") / "base")


def _sides(storage: Storage, run: str) -> dict[str, set[str]]:
    prefix = f"data/{Run(storage, run).require('data.json')['digest']}/split"
    manifest = read_manifest(storage, prefix)
    assert manifest is not None
    return {
        side: {json.loads(line)["text"] for line in storage.read(manifest.path(prefix, f"{side}.jsonl")).splitlines()}
        for side in ("train", "eval")
    }


@pytest.mark.slow
def test_from_the_first_model_to_a_poisoned_feed(tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer.new("ed25519")
    (tmp_path / "own.key").write_bytes(signer.pem())
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "own.key"))
    _recipe(tmp_path, base, chunks={"count": 2, "signing": {"public_key": signer.public.line}})
    storage = Storage(str(tmp_path / "store"))
    _write(tmp_path / "rows.jsonl", _rows(60, 1))
    _write(tmp_path / "feed.jsonl", _rows(20, 2))
    code, first, _ = _retrain(tmp_path)
    assert (code, first["state"], first["words"]) == (0, "promoted", "model 1 of again")

    began = time.monotonic()
    code, found, shown = _retrain(tmp_path)
    assert (code, found["state"]) == (0, "unchanged")
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("✓")] == ["look", "release"]
    assert time.monotonic() - began < 60

    _write(tmp_path / "rows.jsonl", _rows(100, 1))
    code, second, _ = _retrain(tmp_path, "--set", "retrain.start=accepted")
    assert (code, second["state"], second["words"]) == (0, "promoted", "model 2 of again")
    before, after = _sides(storage, first["run"]), _sides(storage, second["run"])
    assert before["eval"] < after["eval"]
    assert not before["eval"] & after["train"]
    old = after["train"] & before["train"]
    assert len(old) == round(len(after["train"] - old) / 4)
    assert Run(storage, second["run"]).recipe().model.base == first["model_uri"]
    evaluation = Run(storage, second["run"]).require("evaluation.json")
    assert evaluation["production_model"] == "accepted, model 1 of again"
    assert evaluation["before"]["loss"] == pytest.approx(evaluation["production"]["loss"], rel=1e-5)

    _write(tmp_path / "feed.jsonl", _poison(400))
    code, third, _ = _retrain(tmp_path)
    assert (code, third["state"]) == (3, "rejected")
    assert third["words"].startswith("loss ")
    assert "is not <= production + 0.05" in third["words"]
    assert "model_uri" not in third
    in_use = lineage.newest_accepted(storage, "again")
    assert (in_use.number, in_use.model_uri) == (2, second["model_uri"])

    code, found, _ = _retrain(tmp_path)
    assert (code, found["state"]) == (0, "unchanged")
    assert f"{third['run']}, rejected" in found["words"]

    models = lineage.Models(storage, "again")
    told = verify_decisions(models, signer.public)
    assert (told["problems"], told["documents"]) == ([], ["accepted/000001.json", "accepted/000002.json"])
    planted = json.loads(storage.read(models.path("accepted/000002.json")))
    models.put("accepted/000003.json", {**planted, "model_uri": first["model_uri"]})
    code, found, shown = _retrain(tmp_path)
    assert (code, found["state"]) == (1, "failed")
    assert "accepted/000003.json is refused: its signature is of other content" in " ".join(shown.split())


@pytest.mark.slow
def test_a_retraining_that_is_killed_goes_on_and_one_beside_it_is_dropped(tmp_path: Path, base: str) -> None:
    _recipe(tmp_path, base, retrain={"concurrency": "drop"})
    storage = Storage(str(tmp_path / "store"))
    _write(tmp_path / "rows.jsonl", _rows(60, 1))
    _write(tmp_path / "feed.jsonl", _rows(20, 2))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    killed = subprocess.Popen(
        _command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
    )
    while not (tmp_path / "store/models/again/turns/000001/runs.json").is_file():
        assert killed.poll() is None
        time.sleep(0.2)
    (run,) = json.loads(storage.read("models/again/turns/000001/runs.json"))
    while not storage.exists(f"runs/{run}/checkpoints/step-00000006/manifest.json"):
        assert killed.poll() is None
        time.sleep(0.2)
    os.killpg(killed.pid, signal.SIGSTOP)  # alive, and without further stages while the other one starts
    code, found, _ = _retrain(tmp_path)
    assert (code, found["state"]) == (0, "busy")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    code, found, shown = _retrain(tmp_path)
    assert (code, found["state"], found.get("run")) == (0, "promoted", run), shown
    attempts = Run(storage, run).attempts(1)
    assert [attempt.outcome for attempt in attempts[-1:]] == ["already_done"]


@pytest.mark.slow
def test_without_a_gate_nothing_is_retrained(tmp_path: Path) -> None:
    _recipe(tmp_path, "org/model", evaluation={})
    _write(tmp_path / "rows.jsonl", _rows(6, 1))
    _write(tmp_path / "feed.jsonl", _rows(2, 2))
    code, found, shown = _retrain(tmp_path)
    assert (code, found["state"]) == (2, "failed")
    assert "has no evaluation.gate, and a retraining promotes what its gate accepts. Set evaluation.production" in shown


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The compiled pipeline."""
    folder = tmp_path_factory.mktemp("compiled")
    recipe = _recipe(folder, "org/model")
    command = [BATON, "compile", str(recipe), "--pipeline", "retrain", "-o", str(folder / "p.yaml")]
    done = subprocess.run([*command, "--store", "s3://baton"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = next(yaml.safe_load_all((folder / "p.yaml").read_text(encoding="utf-8")))
    return found


def test_the_turn_is_ended_whatever_happens_and_training_waits_for_a_change(compiled: dict[str, Any]) -> None:
    tasks = compiled["root"]["dag"]["tasks"]
    assert compiled["pipelineInfo"]["name"] == "again-retrain"
    assert set(tasks) == {"exit-handler-1", "release"}
    assert tasks["release"]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    guarded = compiled["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert set(guarded) == {"look", "condition-2"}
    condition = guarded["condition-2"]["triggerPolicy"]["condition"]
    assert condition == "inputs.parameter_values['pipelinechannel--look-Output'] == 'train'"
    trained = compiled["components"]["comp-condition-2"]["dag"]["tasks"]
    assert {"data-split", "train-chunk", "train-chunk-2", "evaluate", "gate", "promote-or-keep"} <= set(trained)
    assert [
        name for name, task in {**tasks, **guarded, **trained}.items() if name in ("look", "release", "promote-or-keep")
        and task.get("cachingOptions", {}).get("enableCache")
    ] == []  # fmt: skip


def test_a_recipe_of_phases_is_retrained_too(tmp_path: Path) -> None:
    phases = ["pretrain", {"name": "answers", "training": {"method": "sft"}}]
    recipe = _recipe(tmp_path, "org/model", phases=phases)
    command = [BATON, "compile", str(recipe), "--pipeline", "retrain", "-o", str(tmp_path / "p.yaml")]
    done = subprocess.run([*command, "--store", "s3://baton"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "p.yaml").read_text(encoding="utf-8")
    components = next(yaml.safe_load_all(text))["components"]
    trained = components["comp-condition-2"]["dag"]["tasks"]
    baton = trained["promote-or-keep"]["inputs"]["parameters"]["baton"]["taskOutputParameter"]
    assert baton == {"producerTask": "answers", "outputParameterKey": "baton"}  # the last phase's run is promoted
    assert trained["answers"]["dependentTasks"] == ["pretrain"]
    inside = components["comp-pretrain"]["dag"]["tasks"]
    assert inside["pretrain-train-chunk-2"]["taskInfo"]["name"] == "train chunk 2"
