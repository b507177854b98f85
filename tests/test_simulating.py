"""The simulation of sweeps at size, on cases small enough to be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulating import Asynchronous, Barriers, Setting, simulate

EQUAL: dict[str, Any] = {"spread": 0.0, "chunk": 100.0, "start": 10.0, "judge": 5.0}


def test_equal_chunks_fill_the_gpus_wave_by_wave() -> None:
    found = simulate(Setting(trials=8, rungs=3, gpus=4, **EQUAL), Barriers)
    # two waves of 110 s a rung, and two judgements between three rungs
    assert found.makespan == 3 * 2 * 110 + 2 * 5
    assert found.chunks == 24
    assert found.bound == 24 * 110 / 4
    assert found.busy == pytest.approx(24 * 100 / (4 * 670))
    assert found.lost == 0


def test_the_longest_chain_bounds_few_trials_on_many_gpus() -> None:
    found = simulate(Setting(trials=2, rungs=5, gpus=64, **EQUAL), Barriers)
    assert found.bound == 5 * 110
    assert found.makespan == 5 * 110 + 4 * 5


def test_half_go_on_from_each_rung() -> None:
    found = simulate(Setting(trials=8, rungs=3, gpus=8, keep=0.5, **EQUAL), Barriers)
    assert found.chunks == 8 + 4 + 2
    assert found.finished == 2
    assert found.makespan == 3 * 110 + 2 * 5


def test_without_barriers_no_gpu_waits_for_the_slowest() -> None:
    uneven = {**EQUAL, "spread": 0.5}
    asynchronous, barriers = (
        simulate(Setting(trials=64, rungs=4, gpus=8, keep=0.5, **uneven), policy) for policy in (Asynchronous, Barriers)
    )
    assert asynchronous.makespan < barriers.makespan
    assert asynchronous.chunks >= 64 + 32 + 16 + 8 - 1
    assert asynchronous.makespan >= asynchronous.bound


def test_what_is_lost_is_less_than_a_checkpoints_time_for_each_preemption() -> None:
    calm = Setting(trials=40, rungs=2, gpus=4, checkpoint=20.0, away=1.0, **EQUAL)
    quiet = simulate(calm, Barriers)
    wild = simulate(Setting(**{**vars(calm), "preemptions": 36.0}), Barriers)  # every 100 s
    assert wild.chunks == quiet.chunks == 80
    assert wild.makespan > quiet.makespan
    assert 0 < wild.lost < wild.makespan * 4 / 100 * 20 * 1.5
    assert wild.busy * wild.makespan * 4 == pytest.approx(80 * 100), "kept is what there was to do, lost comes on top"


def test_chunks_between_two_rungs_follow_at_once() -> None:
    found = simulate(Setting(trials=4, rungs=5, gpus=4, keep=0.5, eta=2, **EQUAL), Barriers)
    # rungs behind chunks 1, 2 and 4: 4 trials, then 2, then one; chunks 3 and 4 have no judgement between them
    assert found.chunks == 4 + 2 + 1 + 1 + 1
    assert found.makespan == 5 * 110 + 3 * 5
