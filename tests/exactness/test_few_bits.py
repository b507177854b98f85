"""A base in few bits, by method: kills and forks leave no trace, and the export is the whole base with the adapter."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton import fork
from baton.checkpoint.store import CheckpointStore
from baton.runs.outcomes import ExportedModel
from baton.runs.run import Run
from tests.exactness import matrix
from tests.exactness.matrix import FEW_BITS, METHODS, Cell, few_bits

pytestmark = pytest.mark.slow
CELLS = [Cell(method, "lora", feature, few_bits(method, feature)) for method in METHODS for feature in FEW_BITS]
TARGETS = (4, 13, 19)
KILLED_AT = "step:9"


@pytest.fixture(scope="module")
def trained(grid: Any, legs: Any) -> Callable[[Cell, str], Run]:
    """Returns a cell's run, `whole` or `killed` in its second chunk, trained when it is first asked for."""
    runs: dict[str, Run] = {}

    def train(cell: Cell, how: str) -> Run:
        name = f"{cell.name}-bits-{how}"
        if name not in runs:
            run = runs[name] = legs.prepare(grid(cell), name)
            if how == "killed":
                legs.cut(run, TARGETS)
                assert legs.leg(legs.chunk, run.uri, 1)[0] == 0
                code, printed = legs.leg(legs.chunk, run.uri, 2, (), KILLED_AT)
                assert code == -signal.SIGKILL, printed
            legs.train(run)
        return runs[name]

    return train


def test_each_way_to_hold_the_base_computes_with_other_weights(trained: Any, legs: Any) -> None:
    whole = Cell("sft", "lora", "whole", {**matrix.dropping("sft", 0.3), "evaluation": {"every": 5}})
    cells = [whole, *(cell for cell in CELLS if cell.method == "sft")]
    first = {legs.losses(trained(cell, "whole"))[0] for cell in cells}
    assert len(first) == 1 + len(FEW_BITS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_killed_run_ends_on_the_bits_of_one_run(cell: Cell, trained: Any, legs: Any) -> None:
    killed, whole = trained(cell, "killed"), trained(cell, "whole")
    assert legs.losses(killed) == legs.losses(whole)
    assert legs.final(killed).meta.state == legs.final(whole).meta.state


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_fork_ends_on_its_parents_bits_and_with_another_rate_on_others(cell: Cell, trained: Any, legs: Any) -> None:
    parent, found = trained(cell, "killed"), {}
    for name, overrides in (("same", []), ("faster", ["training.learning_rate=0.01"])):
        made = fork.fork(parent, TARGETS[0], f"{parent.name}-{name}", overrides)
        run = legs.prepare(made.recipe, f"{parent.name}-{name}")
        legs.train(run)
        found[name] = legs.final(run).meta.state
    assert found["same"] == legs.final(parent).meta.state
    assert found["faster"]["weights"] != found["same"]["weights"]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_export_is_the_base_in_full_precision_with_the_adapter(
    cell: Cell, trained: Any, legs: Any, base_model: str
) -> None:
    run = trained(cell, "whole")
    code, printed = legs.leg(legs.export, run.uri)
    assert code == 0, printed
    exported = load_file(f"{run.need(ExportedModel).model_uri}/model.safetensors")
    store, checkpoint = CheckpointStore(run), legs.final(run)
    saved = checkpoint.manifest.path(store.prefix(checkpoint.step), "adapter_model.safetensors")
    adapter = {name: value.float() for name, value in load_file(store.storage.key(saved)).items()}
    base = load_file(f"{base_model}/model.safetensors")
    adapted = set()
    for name, value in base.items():
        if name not in exported:  # a reward model has a score in the head's place
            assert name == "lm_head.weight"
            assert cell.method == "reward"
            continue
        layer = f"base_model.model.{name.removesuffix('.weight')}.lora"
        if f"{layer}_A.weight" in adapter:
            adapted.add(name.split(".")[-2])
            value = value + adapter[f"{layer}_B.weight"] @ adapter[f"{layer}_A.weight"] * (
                matrix.LORA["alpha"] / matrix.LORA["r"]
            )
        assert torch.equal(exported[name], value), name
    assert adapted == set(matrix.LORA["target_modules"])
    assert not json.loads(Path(run.need(ExportedModel).model_uri, "config.json").read_text()).get("quantization_config")
