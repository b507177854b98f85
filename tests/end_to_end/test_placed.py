"""A pipeline with `resources.capacity: spot-first` on kfp's own engine: choices of nodes travel, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.compiler.pipeline_file import write_package
from baton.local import engine, results
from baton.runs.run import Run
from baton.source import prepare
from baton.store.storage import Storage

RECIPE = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
PLACED = ["budget.by=2099-12-01T18:00Z", "resources.capacity=spot-first"]


@pytest.mark.slow
def test_nodes_are_handed_from_chunk_to_chunk_and_change_no_bit(tmp_path: Path) -> None:
    def digest(name: str, overrides: list[str], **arguments: Any) -> str:
        package, store = str(tmp_path / f"{name}.yaml"), str(tmp_path / name)
        loaded = prepare.load(RECIPE, overrides, store=store, chunks=9)  # in two graphs
        write_package(loaded.localised(), package)
        engine.run(package, name, {"run_name": "mine", **arguments}, on_event=lambda event: None)
        found = results.result(Run(Storage(store), "mine"))
        assert found["state"] == "succeeded"
        return str(found["checkpoints"][-1]["digest"])

    plain = digest("plain", [])
    assert digest("placed", PLACED) == plain
    assert digest("on-demand", PLACED, nodes={"karpenter.sh/capacity-type": "on-demand"}) == plain
