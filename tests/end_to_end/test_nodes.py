"""With several nodes a chunk's own pod asks for nothing that its job's pods ask for; other stages keep theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler

from baton.errors import UserError
from baton.local import engine
from baton.pipelines.finetune import finetune
from baton.recipe import load

SCRATCH = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
GPUS = [
    "training.parallel.virtual_workers=4",
    "resources.gpus=2",
    "resources.cpu=8",
    "resources.memory=64Gi",
    "resources.node_selector.pool=gpu",
    "resources.cache_claim=cache",
    "store.cache_dir=/cache",
    "resources.secret=baton-store",
    "tracking.prometheus_port=9095",
    'chunks.preemption.node_taints=["going"]',
]


def _compiled(folder: Path, nodes: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns containers and settings of the pods, each by executor."""
    package = folder / f"{len(list(folder.iterdir()))}.yaml"
    compiler.Compiler().compile(finetune(load.load(SCRATCH, [*GPUS, f"resources.nodes={nodes}"])), str(package))
    spec, platform = yaml.safe_load_all(package.read_text())
    return (
        spec["deploymentSpec"]["executors"],
        platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"],
    )


@pytest.mark.parametrize("nodes", [2, "{min: 1, max: 2}"])
def test_the_chunks_pod_only_follows(nodes: object, tmp_path: Path) -> None:
    containers, settings = _compiled(tmp_path, nodes)
    assert "resources" not in containers["exec-train-chunk"]["container"]
    chunk = settings["exec-train-chunk"]
    assert not {"nodeSelector", "emptyDirMounts", "pvcMount"} & chunk.keys()
    assert "annotations" not in chunk["podMetadata"]
    assert chunk["secretAsEnv"][0]["secretName"] == "baton-store"
    assert {entry["name"] for entry in chunk["fieldPathAsEnv"]} == {"KFP_RUN_ID", "NODE_NAME"}


def test_other_stages_keep_what_they_ask_for(tmp_path: Path) -> None:
    several, one = _compiled(tmp_path, 2), _compiled(tmp_path, 1)
    assert several[0]["exec-evaluate"]["container"]["resources"] == one[0]["exec-evaluate"]["container"]["resources"]
    assert one[0]["exec-train-chunk"]["container"]["resources"]["accelerator"]["resourceCount"] == "2"
    assert several[1]["exec-evaluate"] == one[1]["exec-evaluate"]


@pytest.mark.parametrize("nodes", ["resources.nodes=2", "resources.nodes={max: 2}"])
def test_one_machine_refuses_several_at_once(nodes: str) -> None:
    recipe = load.load(SCRATCH, [nodes, "training.parallel.virtual_workers=4"])
    with pytest.raises(UserError, match=r"resources\.nodes is 2, and this is one machine"):
        engine.run_recipe(recipe, "r", arguments={}, on_event=lambda event: None, containers=False)
