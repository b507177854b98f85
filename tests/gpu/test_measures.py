"""Figures of training on this machine, for the table: none of them is judged, but bits and memory are compared."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.recipe import load
from baton.runs.documents import MicroBatchSize
from baton.runs.run import Run
from tests.gpu import cells, measured
from tests.gpu.conftest import HAS_GPU

pytestmark = [pytest.mark.gpu if HAS_GPU else pytest.mark.slow, pytest.mark.timeout(900)]
Tell = Callable[..., None]
WARM = 3
"""Steps that are left out of a median: kernels are chosen and memory is taken in them."""
SLACK = 64 * 2**20
"""Bytes by which a resumed chunk may need more than one that is never stopped."""


@pytest.fixture(scope="module")
def runs(legs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[measured.Runs]:
    """Runs of one model; what they leave is removed, as it may be many GB."""
    folder = tmp_path_factory.mktemp("measured")
    yield measured.Runs(legs, folder)
    shutil.rmtree(folder)


def step_time(figures: dict[str, Any]) -> float:
    """Seconds of a step, the median."""
    return statistics.median(figures["seconds"][WARM:])


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def metrics(run: Run) -> list[dict[str, float]]:
    """What a run's chunks logged."""
    names = run.storage.list(run.path("metrics"))
    texts = [run.storage.read(run.path(f"metrics/{name}")).decode() for name in names]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_beside_plain_trl_and_what_determinism_costs(runs: measured.Runs, tell: Tell) -> None:
    run = runs.legs.prepare(runs.recipe(), "deterministic")
    loose = runs.legs.prepare(runs.recipe(deterministic=False), "loose")
    ours, ours_loose = runs.chunk(run), runs.chunk(loose)
    theirs, theirs_loose = runs.plain(run, deterministic=True), runs.plain(run, deterministic=False)
    assert ours["losses"] == theirs["losses"]
    assert len(set(ours["losses"])) > 1
    for who, strict, free in (("Baton", ours, ours_loose), ("plain TRL", theirs, theirs_loose)):
        tell(f"{who}: step", f"{1e3 * step_time(strict):.1f} ms, {1e3 * step_time(free):.1f} ms not deterministic")
        tell(f"{who}: cost of determinism", f"{step_time(strict) / step_time(free) - 1:+.1%}", "≤ 10 %")
        tell(f"{who}: memory", f"{gigabytes(strict['peak'])}, {gigabytes(free['peak'])} not deterministic")
    tell("Baton over plain TRL: step", f"{step_time(ours) / step_time(theirs) - 1:+.1%}")
    tell("Baton over plain TRL: memory", f"{ours['peak'] / theirs['peak'] - 1:+.1%}")
    logged = [entry for entry in metrics(run) if "tokens_per_second" in entry][WARM:]
    tell("tokens a second", f"{statistics.median(entry['tokens_per_second'] for entry in logged):,.0f}")
    shares = [entry["mfu"] for entry in logged if "mfu" in entry]
    tell("MFU", f"{statistics.median(shares):.1%}" if shares else "the device's peak is not known")
    tell("GPU busy", f"{statistics.mean(ours['busy']):.0f} %" if ours["busy"] else "no GPU, or no nvidia-ml-py")


def test_a_micro_batch_is_found_that_fits(runs: measured.Runs, tell: Tell) -> None:
    recipe = runs.recipe(batch_size=64 if HAS_GPU else 4, micro_batch_size="auto", steps=3)
    run = runs.legs.prepare(recipe, "auto")
    figures = runs.chunk(run)
    found = run.need(MicroBatchSize)
    assert found.found_by == ("trial" if HAS_GPU else "estimate")
    assert len(figures["losses"]) == 3
    tell("rows at once", f"{found.micro_batch_size} of {recipe.training.batch_size}, by {found.found_by}")
    tell("memory", gigabytes(figures["peak"]))


def test_checkpoints_beside_training(runs: measured.Runs, tell: Tell) -> None:
    """The same steps with checkpoints and without; training waits for no upload."""
    every = measured.SCALE.steps // 3
    loose = {"chunks.wait_for_commit": False}
    plain = runs.legs.prepare(load.with_values(runs.recipe(), loose), "without-checkpoints")
    saving = runs.legs.prepare(
        load.with_values(runs.recipe(), loose | {"chunks.checkpoint_every": every}), "with-checkpoints"
    )
    without, beside = runs.chunk(plain), runs.chunk(saving)
    assert beside["losses"] == without["losses"]
    attempt = saving.attempts(1)[-1]
    tell("checkpoint", f"{gigabytes(runs.legs.final(saving).bytes)}, every {every} steps")
    tell("extra time", f"{sum(beside['seconds'][WARM:]) / sum(without['seconds'][WARM:]) - 1:+.1%}")
    tell("training stands still", f"{statistics.median(attempt.save_stalls):.2f} s a checkpoint")
    tell("upload", f"{attempt.seconds['upload']:.2f} s in all")


@pytest.mark.parametrize("size", measured.sizes_gb(), ids=lambda size: f"{size:g} GB")
def test_save_and_restore(size: float, runs: measured.Runs, tell: Tell) -> None:
    if why := measured.no_room(size, runs.folder):
        pytest.skip(why)
    recipe = runs.recipe(layers=measured.layers_for(size), steps=2, batch_size=2, micro_batch_size=1)
    run = runs.legs.prepare(recipe, f"size-{size:g}".replace(".", "-"))
    runs.legs.cut(run, [1, 2])
    for index in (1, 2):
        runs.chunk(run, index)
    first, second = run.attempts(1)[-1], run.attempts(2)[-1]
    real = runs.legs.final(run).bytes
    assert real == pytest.approx(size * 1e9, rel=0.5)
    tell("checkpoint", gigabytes(real))
    tell("save: training stands still", f"{max(first.save_stalls):.2f} s")
    tell("save: upload", f"{first.seconds['upload']:.2f} s")
    tell("restore: fetch", f"{second.seconds['fetch']:.2f} s")
    tell("restore: to the device, and the proof", f"{second.seconds['restore']:.2f} s")
    shutil.rmtree(Path(run.uri), ignore_errors=True)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_a_resumed_chunk_needs_no_more_memory(optimizer: str, runs: measured.Runs, tell: Tell) -> None:
    if optimizer != "adamw_torch":
        pytest.importorskip("bitsandbytes", reason=f"{cells.PIP[cells.BITS]} is not installed")
    recipe = runs.recipe(optimizer=optimizer, steps=4)
    name = optimizer.replace("_", "-")
    whole, parts = runs.legs.prepare(recipe, f"{name}-whole"), runs.legs.prepare(recipe, f"{name}-parts")
    runs.legs.cut(parts, [2, 4])
    uninterrupted = runs.chunk(whole)
    first, resumed = (runs.chunk(parts, index) for index in (1, 2))
    assert [*first["losses"], *resumed["losses"]] == uninterrupted["losses"]
    assert runs.legs.final(parts).meta.state == runs.legs.final(whole).meta.state
    for what in ("peak", "reserved"):
        tell(f"{what}, uninterrupted and resumed", f"{gigabytes(uninterrupted[what])}, {gigabytes(resumed[what])}")
    if HAS_GPU:
        assert resumed["peak"] <= uninterrupted["peak"] + SLACK
