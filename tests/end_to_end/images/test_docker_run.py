"""`baton run --runner docker`: the compiled pipeline, each stage in a container of the built image."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

SECRET = "planted-8f21c7-secret"
LOST = Path(__file__).parents[2] / "support/hooks/lost.py"
QUICKSTART = Path(__file__).parents[3] / "pipelines/recipes/quickstart.yaml"
LABEL = {"label": "baton/recipe=in-containers"}
RECIPE = {
    "name": "in-containers",
    "seed": 11,
    "model": {
        "from_scratch": {"architecture": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "tokenizer": {"train": {"vocab_size": 400}},
    },
    "data": {"source": "rows.jsonl", "max_length": 32, "split": {"eval": 0.2}},
    "training": {"method": "sft", "batch_size": 8, "max_steps": 6, "learning_rate": 1e-2},
    "chunks": {"count": 2},
    "evaluation": {"samples": 1, "max_new_tokens": 4},
    "resources": {"memory": "3Gi", "shm": "256Mi"},
    "tracking": {"mlflow": None},
}


class Baton:
    """`baton run` of one recipe with one seed, in its own folder."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = {**os.environ, **env, "BATON_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        rows = [
            {"prompt": f"What is {i} plus {i + 1}?", "completion": f"{i} plus {i + 1} is {2 * i + 1}."}
            for i in range(40)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "store": "store"}))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "baton", "run", "recipe.yaml", "--output", "json", *arguments]
        root = str(Path(__file__).parents[3])
        env = {**self.env, "PYTHONPATH": root}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, env=env, text=True, **streams)

    def run(self, *arguments: str) -> tuple[dict[str, Any], str]:
        process = self.start(*arguments)
        output, errors = process.communicate()
        assert output, errors
        return json.loads(output), errors


@pytest.fixture
def baton(tmp_path: Path) -> Baton:
    return Baton(tmp_path, {})


def digests(found: dict[str, Any]) -> list[tuple[int, str]]:
    assert found["state"] == "succeeded", found
    return [(row["step"], row["digest"]) for row in found["checkpoints"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Digests of the same recipe, its stages processes of this machine."""
    found, _ = Baton(tmp_path_factory.mktemp("processes"), {}).run()
    assert [row["step"] for row in found["checkpoints"]] == [3, 6]
    return digests(found)


@pytest.mark.slow
def test_containers_and_a_bucket_give_the_bits_of_processes_and_a_folder(
    image, engine, baton, undisturbed, s3_store, s3_credentials
):
    baton.env |= {**s3_credentials, "AWS_SECRET_ACCESS_KEY": SECRET}
    found, errors = baton.run("--runner", "docker", "--image", image, "--store", s3_store)
    assert digests(found) == undisturbed
    assert [line.split(" (")[0] for line in errors.splitlines() if "train chunk" in line] == [
        "✓ train chunk 1 of 2",
        "✓ train chunk 2 of 2",
    ]
    assert engine.containers.list(all=True, filters=LABEL) == []
    told = [path for path in baton.folder.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]
    assert told == []
    assert SECRET not in errors


@pytest.mark.slow
def test_the_quickstart_runs_in_containers_with_its_store_in_a_bucket(image, baton, s3_store, s3_credentials):
    shutil.copy(QUICKSTART, baton.folder / "recipe.yaml")
    baton.env |= s3_credentials
    found, errors = baton.run("--runner", "docker", "--image", image, "--store", s3_store)
    assert found["state"] == "succeeded", errors
    assert len(found["checkpoints"]) > 1


@pytest.mark.slow
def test_without_a_gpu_its_image_gives_the_bits_of_processes(gpu_image, baton, undisturbed):
    found, errors = baton.run("--runner", "docker", "--image", gpu_image)
    assert digests(found) == undisturbed
    assert "kernels" not in errors


def end(baton: Baton, number: signal.Signals, *arguments: str) -> int:
    """Start a run, send it a signal once its tokens are made, and return its exit code."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would the run
    process = baton.start(*arguments)
    assert process.stderr
    for line in process.stderr:
        if "tokenize (" in line:
            break
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_container_and_goes_on(image, engine, baton, undisturbed):
    arguments = ("--run", "one", "--runner", "docker", "--image", image)
    assert end(baton, signal.SIGINT, *arguments) == 130
    assert engine.containers.list(all=True, filters=LABEL) == []
    assert digests(baton.run(*arguments)[0]) == undisturbed
    assert {path.stat().st_uid for path in baton.folder.rglob("*")} == {os.getuid()}


@pytest.mark.slow
def test_a_run_that_is_told_to_end_leaves_no_container(image, engine, baton):
    assert end(baton, signal.SIGTERM, "--runner", "docker", "--image", image) == 143
    assert engine.containers.list(all=True, filters=LABEL) == []


@pytest.mark.slow
def test_a_stage_that_fails_gives_its_one_message(image, baton):
    (baton.folder / "rows.jsonl").write_text('{"unknown": 1}\n' * 40)
    found, errors = baton.run("--runner", "docker", "--image", image)
    assert found["exit_code"] == 2
    assert found["error"].startswith("data split: ")
    assert "Traceback" not in errors


def run_with(baton: Baton, image: str, ends: str) -> dict[str, Any]:
    """Runs the recipe with a callback by which the process that trains ends after step 5, once."""
    callback = {"use": "lost:Lost", "options": {"ends": ends, "mark": "lost"}}
    recipe = {**RECIPE, "store": "store", "hooks": {"source": str(LOST), "callbacks": [callback]}}
    (baton.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return baton.run("--run", "r", "--runner", "docker", "--image", image)[0]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["killed", "device", "store"])
def test_a_process_that_is_lost_in_its_container_is_followed_by_a_fresh_one(ends, image, baton, undisturbed):
    assert digests(run_with(baton, image, ends)) == undisturbed
    assert len(list((baton.folder / "store/runs/r/restarts").iterdir())) == 1


@pytest.mark.slow
def test_a_mistake_in_a_container_does_not_start_twice(image, baton):
    found = run_with(baton, image, "mistake")
    assert (found["state"], found.get("run")) == ("failed", "r"), found
    assert "a mistake of the user's own" in found["error"]
    assert not (baton.folder / "store/runs/r/restarts").exists()
