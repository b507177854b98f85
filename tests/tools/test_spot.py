"""The simulator of spot capacity: its accounts by hand, and its policies against the optimum on recorded traces."""

from __future__ import annotations

import json

import pytest

from baton.runs.capacity import Course
from tools import spot

COURSE = Course(work=1800, time=3600, change=180)


def trace(*runs: tuple[int, int]) -> spot.Trace:
    """A trace of looks every three minutes: (state, number) after each other."""
    return spot.Trace({"gap_seconds": spot.GRID, "runs": list(runs)})


@pytest.mark.parametrize(
    ("policy", "runs", "price", "time"),
    [
        # 30 minutes of work and a change of 3: eleven looks.
        ("on demand", [(0, 40)], 33 * 3, 33),
        ("spot alone", [(1, 40)], 33, 33),
        # Taken after 12 minutes, 9 of them work; back after 6 more.
        ("spot alone", [(1, 4), (0, 2), (1, 40)], 12 + 3 + 21, 42),
        # Without spot it waits while two changes and the work fit into the hour: until 24.
        ("greedy", [(0, 40)], 33 * 3, 24 + 33),
        ("greedy", [(1, 4), (0, 40)], 12 + 24 * 3, 33 + 24),
        ("Uniform Progress", [(1, 40)], 33, 33),
        ("Baton, 10 min", [(1, 40)], 33, 33),
        # Nothing is done, so it is behind at once. After each chunk it is at most 17 minutes ahead: two changes.
        ("Baton, 10 min", [(0, 40)], None, 60),
    ],
)
def test_price_and_end_by_hand(policy: str, runs: list[tuple[int, int]], price: float | None, time: float) -> None:
    ended = spot.POLICIES[policy](spot.Job(trace(*runs), 0, COURSE), COURSE)
    if price is None:
        assert ended.time <= time * 60
    else:
        assert (ended.price * 60, ended.time / 60) == pytest.approx((price, time))


@pytest.mark.parametrize(
    ("runs", "price"),
    [
        ([(1, 40)], 33),
        ([(0, 40)], 99),
        ([(0, 9), (1, 31)], 33),  # waits 27 minutes, and ends at 60
        ([(1, 4), (0, 40)], 12 + 24 * 3),
    ],
)
def test_the_optimum_by_hand(runs: list[tuple[int, int]], price: float) -> None:
    assert spot.optimum(trace(*runs), 0, COURSE) * 60 == pytest.approx(price)


def test_no_policy_beats_the_optimum_or_misses_a_deadline_that_on_demand_meets() -> None:
    recorded = json.loads(spot.TRACES.read_text(encoding="utf-8"))
    course = Course(work=6 * 3600, time=6 * 3600 * 1.25, change=180)
    for name in list(recorded)[::4]:
        found = spot.Trace(recorded[name])
        for start in range(0, 5 * 86400, 86400):
            least = spot.optimum(found, start, course)
            for policy, run in spot.POLICIES.items():
                ended = run(spot.Job(found, start, course), course)
                if policy != "spot alone":
                    assert ended.time <= course.time + spot.EPSILON, (name, start, policy)
                    assert ended.price >= least - spot.EPSILON, (name, start, policy)
