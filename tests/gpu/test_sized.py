"""Models of published sizes with random weights: one chunk against many, each of them killed once.

Folder `BATON_GPU_FOLDER` keeps the runs: a second call goes on where the first was stopped.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.models import memory
from baton.recipe.recipe import Recipe
from tests.gpu import measured
from tests.gpu.conftest import FOLDER, HAS_GPU
from tests.gpu.test_measures import gigabytes, step_time

pytestmark = [pytest.mark.gpu if HAS_GPU else pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def runs(legs: Any, tmp_path_factory: pytest.TempPathFactory) -> measured.Runs:
    folder = Path(os.environ.get(FOLDER) or tmp_path_factory.mktemp("sized"))
    folder.mkdir(parents=True, exist_ok=True)
    return measured.Runs(legs, folder)


def whole(runs: measured.Runs, recipe: Recipe, name: str) -> tuple[Any, dict[str, Any]]:
    """Returns the run in one chunk, and its process's figures."""
    run, noted = runs.legs.prepare(recipe, f"{name}-whole"), runs.folder / f"{name}-whole.json"
    if not noted.exists():
        noted.write_text(json.dumps(runs.chunk(run)), encoding="utf-8")
    figures: dict[str, Any] = json.loads(noted.read_text(encoding="utf-8"))
    return run, figures


def killed(runs: measured.Runs, recipe: Recipe, name: str) -> Any:
    """Returns the run in chunks whose processes are killed after their first step."""
    run, begin = runs.legs.prepare(recipe, f"{name}-killed"), 0
    for index, target in enumerate(run.plan().targets, 1):
        noted = runs.folder / f"{name}-killed-{index}"
        if not noted.exists():
            code, printed = runs.legs.leg(runs.legs.chunk, run.uri, index, (), f"step:{begin + 1}")
            assert code == -signal.SIGKILL, printed
            noted.touch()
        if max(runs.legs.steps(run), default=0) < target:
            code, printed = runs.legs.leg(runs.legs.chunk, run.uri, index)
            assert code == 0, printed
        begin = target
    return run


@pytest.mark.parametrize("size", measured.sized())
def test_killed_chunks_end_on_the_bits_of_one_run(size: str, runs: measured.Runs, tell: Callable[..., None]) -> None:
    one, many = runs.sized(size, 1), runs.sized(size, measured.sized()[size].chunks)
    name = size.partition(",")[0].replace(" ", "-").replace(".", "-").lower()
    undisturbed, figures = whole(runs, one, name)
    parts = killed(runs, many, name)
    ours, theirs = runs.legs.final(parts).meta.state, runs.legs.final(undisturbed).meta.state
    assert runs.legs.losses(parts) == runs.legs.losses(undisturbed)
    assert ours == theirs
    estimate = memory.estimate(one, memory.build_skeleton(one))
    tokens = one.training.batch_size * one.data.max_length
    tell("model", f"{estimate.parameters / 1e9:.2f} B parameters, {estimate.trainable / 1e6:.0f} M trained")
    tell("state digest", f"{theirs['state'][:16]}, 1 chunk and {many.num_chunks} killed ones")
    tell("tokens a second", f"{tokens / step_time(figures):,.0f}, steps of {tokens:,} tokens")
    tell("checkpoint", gigabytes(runs.legs.final(undisturbed).bytes))
    of_cuda = gigabytes(memory.OVERHEAD)
    tell("peak memory", gigabytes(figures["peak"]), f"{gigabytes(estimate.total)} estimated, {of_cuda} of it CUDA's")
