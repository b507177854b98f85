"""A few thousand schedules of the store's code, and the faults that they must find."""

import pytest

from tools.schedules import explore
from tools.schedules.planted import PLANTED, Planted, search
from tools.schedules.scenarios import SCENARIOS, Scenario
from tools.schedules.scheduler import Choices, is_green

SCHEDULES = 150 if is_green() else 50
"""Without greenlets a switch is the operating system's."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_invariant_is_broken(scenario: Scenario):
    result = explore.explore(scenario, range(SCHEDULES))

    assert result.broken == []
    assert len(result.orders) > SCHEDULES / 3 or scenario.share == 1


@pytest.mark.parametrize("name", ["two writers", "a cut file and a removal"])
def test_no_invariant_is_broken_in_any_order(name: str):
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)

    # Neither has so many places at which one could make way for the other.
    result, all_of_them = explore.exhaust(scenario, changes=12 if is_green() else 1, most=2000)

    assert result.broken == []
    assert all_of_them
    assert len(result.orders) > 20


@pytest.mark.parametrize("planted", [planted for planted in PLANTED if planted.soon], ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted):
    assert search(planted, 200)


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_every_planted_fault_is_found(planted: Planted):
    assert search(planted, 3000)


def test_the_same_seed_is_the_same_schedule():
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "a zombie, faults")
    logs: list[list[str]] = [[], []]
    for log in logs:
        explore.run_seed(scenario, 7, Choices(7), log)

    assert [line for line in logs[0] if "/records/" not in line] == [
        line for line in logs[1] if "/records/" not in line
    ]
