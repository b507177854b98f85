"""Shards of tokenizing by kfp's own local engine: what a cluster runs, and the tokens of one process."""

import json
import re
from pathlib import Path

import pytest
from kfp import compiler, dsl

from baton import events
from baton.events import Event
from baton.kfp import processes
from baton.local import engine
from baton.pipelines import finetune
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

ROWS = 30_000
"""Of some 200 bytes: about six segments."""


def _recipe(folder: Path, shards: int) -> Recipe:
    folder.mkdir()
    rows = folder.parent / "rows.jsonl"
    if not rows.exists():
        texts = (f"{n} of {n * n % 977} is {n % 13} " * (n % 9 + 4) for n in range(ROWS))
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    document = {
        "name": "sharded",
        "store": str(folder / "store"),
        "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": str(rows), "max_length": 64, "shards": shards, "split": {"eval": 0.05}},
        "training": {"method": "pretrain", "max_steps": 2},
        "tracking": {"mlflow": None},
    }
    return load.validate(document, origin="r.yaml")


def _tokens(recipe: Recipe) -> tuple[str, dict[str, str]]:
    """Returns the address of a run's tokens, and the hashes of their files without their writers' names."""
    run = Run(Storage(recipe.store.uri), "tokens")
    told = run.require("tokens.json")
    manifest = read_manifest(run.storage, told["prefix"])
    assert manifest
    files = manifest.files.items()
    hashes = {re.sub(r"-[0-9a-f]{8}\.", ".", name): entry["sha256"] for name, entry in files if "state" not in name}
    return told["digest"], hashes


@pytest.mark.slow
def test_five_shards_by_kfps_engine_come_to_the_tokens_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    recipe, alone = _recipe(tmp_path / "five", 5), _recipe(tmp_path / "one", 1)
    (graph,) = finetune.inner_graphs(recipe)

    @dsl.pipeline(name="tokens")
    def tokens() -> str:
        split = finetune.split_task(recipe, recipe.store.uri, run_name="tokens")
        return graph.of(baton=split.outputs["Output"]).outputs["Output"]

    compiler.Compiler().compile(tokens, str(tmp_path / "tokens.yaml"))
    heard: list[Event] = []
    engine.run(str(tmp_path / "tokens.yaml"), "tokens", {}, on_event=heard.append)
    processes.prepare(alone, "tokens", heard.append)
    assert _tokens(recipe) == _tokens(alone)
    parts = [event.part for event in heard if isinstance(event, events.Tokenized)]
    assert len(parts) == 2 * len(set(parts)) > 10, "each segment once by a shard, and once by the process alone"
