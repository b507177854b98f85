"""Shards of tokenizing in the compiled pipeline."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, write_package
from baton.recipe import load
from tests.support import conformance

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "pipelines/recipes/quickstart.yaml"
BATON = str(Path(sys.executable).parent / "baton")


def _compile(target: Path, *settings: str) -> dict[str, Any]:
    recipe = pipeline_file.for_cluster(load.load(str(QUICKSTART), settings))
    write_package(recipe, str(target), Pipeline.finetune)
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(target.read_text()))
    assert conformance.check_documents(documents) == []
    return documents[0]


def _waits_for(tasks: dict[str, Any], name: str) -> set[str]:
    return set(tasks[name].get("dependentTasks", ()))


@pytest.mark.parametrize("trains", [True, False], ids=["trained tokenizer", "given tokenizer"])
def test_shards_lie_in_a_graph_and_both_are_lines(trains: bool, tmp_path: Path) -> None:
    tokenizer = [] if trains else ["model.tokenizer={base: org/model}"]
    spec = _compile(tmp_path / "p.yaml", "data.shards=3", *tokenizer)
    root = spec["root"]["dag"]["tasks"]
    for before, after in itertools.pairwise(["data-split", "tokenize-shards", "train-chunk"]):
        assert _waits_for(root, after) == {before}
        assert root[after]["inputs"]["parameters"]["baton"]["taskOutputParameter"]["producerTask"] == before
    inside = spec["components"]["comp-tokenize-shards"]["dag"]["tasks"]
    names = {task["taskInfo"]["name"]: name for name, task in inside.items()}
    line = [*(["train tokenizer"] if trains else []), "shards", "tokenize"]
    assert set(names) == set(line)
    assert _waits_for(inside, names[line[0]]) == set()
    for before, after in itertools.pairwise(line):
        assert _waits_for(inside, names[after]) == {names[before]}
        taken = inside[names[after]]["inputs"]["parameters"].values()
        assert not any("taskOutputParameter" in value for value in taken)
    loop = inside[names["shards"]]
    assert loop["parameterIterator"]["items"]["raw"] == "[1, 2, 3]"
    (shard,) = spec["components"][loop["componentRef"]["name"]]["dag"]["tasks"].values()
    assert shard["cachingOptions"] == {"enableCache": True}
    assert shard["retryPolicy"]["backoffMaxDuration"] == "86400s"
    assert shard["inputs"]["parameters"]["of"] == {"runtimeValue": {"constant": 3}}


def test_one_shard_is_no_graph(tmp_path: Path) -> None:
    plain = _compile(tmp_path / "p.yaml")
    assert _compile(tmp_path / "q.yaml", "data.shards=1") == plain


@pytest.mark.parametrize("number", [-1, 0, 65])
def test_a_number_of_shards_that_makes_no_sense_is_refused(number: int) -> None:
    command = [BATON, "validate", str(QUICKSTART), "--set", f"data.shards={number}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"data.shards: {number}; expected 1 to 64" in done.stderr
    assert "Remove it for one pod" in done.stderr
