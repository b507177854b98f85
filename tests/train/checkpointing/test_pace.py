"""Checkpoints that follow each other cost what they may, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.train.attempt import COST, STALL, Pace


class Training:
    """Steps of a given length, which uploads make longer.

    Args:
        step: Seconds of a step.
        stall: Seconds for which a checkpoint holds training.
        upload: Seconds until it has arrived.
        slower: What a step beside an upload takes more.
    """

    def __init__(self, step: float, stall: float, upload: float, slower: float) -> None:
        self.now = 0.0
        self.pace = Pace(lambda: self.now)
        self.given = (step, stall, upload, slower)
        self.saves: list[float] = []
        self.arrives = 0.0

    def train(self, seconds: float) -> None:
        step, stall, upload, slower = self.given
        until = self.now + seconds
        while self.now < until:
            self.now += step * (1 + slower if self.now < self.arrives else 1)
            is_free = self.now >= self.arrives
            is_due = self.pace.is_due()
            self.pace.step(is_free=is_free)
            if is_due and is_free:
                self.pace.saving()
                self.saves.append(self.now)
                self.now += stall
                self.pace.saved()
                self.arrives = self.now + upload

    @property
    def intervals(self) -> list[float]:
        return [then - before for before, then in zip(self.saves, self.saves[1:], strict=False)]


def test_what_costs_nothing_follows_as_soon_as_the_last_has_arrived() -> None:
    training = Training(step=0.5, stall=0.0, upload=3.0, slower=0.0)
    training.train(600)
    assert len(training.intervals) > 150
    assert sorted(training.intervals)[len(training.intervals) // 2] == 3.0
    assert max(training.intervals) <= 4.0, "one waits for a step beside no upload"


@pytest.mark.parametrize(
    ("stall", "slower", "seconds"), [(0.25, 0.0, 0.25 / STALL), (0.0, 1.0, 0.5 * 4 / COST), (0.125, 0.0, 0.125 / STALL)]
)
def test_what_costs_something_waits(stall: float, slower: float, seconds: float) -> None:
    training = Training(step=0.125, stall=stall, upload=4.0, slower=slower)
    training.train(2000)
    later = training.intervals[3:]
    assert len(later) > 40
    assert min(later) >= seconds
    assert max(later) <= seconds + 1.0


def test_a_cost_that_grows_is_noticed() -> None:
    training = Training(step=0.125, stall=0.015625, upload=1.0, slower=0.0)
    training.train(100)
    assert max(training.intervals[1:]) <= 2
    training.given = (0.125, 0.015625, 1.0, 1.0)
    training.train(400)
    assert min(training.intervals[-5:]) > 5


def test_the_first_one_waits_for_steps_to_compare_with() -> None:
    training = Training(step=1.0, stall=0.0, upload=2.0, slower=0.0)
    training.train(3)
    assert not training.saves
    training.train(2)
    assert len(training.saves) == 1


@pytest.mark.parametrize("odd", [(0.5, 0.0625, 0.25, 7.0), (0.5, 2.0, 0.25, 0.0)], ids=["step", "stall"])
def test_one_odd_time_in_a_life_says_nothing(odd: tuple[float, float, float, float]) -> None:
    usual = (0.5, 0.0625, 0.25, 0.0)
    training = Training(*usual)
    for given in (usual, odd, usual):
        training.given = given
        saves = len(training.saves)
        while len(training.saves) == saves:
            training.train(0.1)
    training.train(60)
    assert max(training.intervals) <= 0.0625 / STALL + 4, "and not the time that the odd one would ask for"


Event = tuple[str, float]
"""A step of so many seconds that ends `free`, or `beside` an upload; a `save` that holds training; or a `pause`."""


def paced(events: Sequence[Event]) -> tuple[Pace, list[bool]]:
    """Returns a pace after some events, and after each step whether a checkpoint was due."""
    now = 100.0
    pace, due = Pace(lambda: now), []
    for kind, seconds in events:
        if kind == "save":
            pace.saving()
        now += seconds
        if kind == "save":
            pace.saved()
        elif kind != "pause":
            due.append(pace.is_due())
            pace.step(is_free=kind == "free")
    return pace, due


IDLE: list[Event] = [("free", 1.0)] * 3  # the first one warms up
SAVE: list[Event] = [("save", 0.0)]


def upload(*seconds: float) -> list[Event]:
    """Returns steps beside an upload, the last of which sees it arrive."""
    return [*(("beside", each) for each in seconds[:-1]), ("free", seconds[-1])]


INTERVALS: dict[str, tuple[list[Event], float]] = {
    "nothing is known": ([], 0.0),
    "a stall is at most 2%": ([("save", 0.1)], 5.0),
    "the shorter of two stalls": ([("save", 0.3), ("save", 0.1)], 5.0),
    "the middle of three": ([("save", 0.3), ("save", 0.1), ("save", 0.2)], 10.0),
    "stalls of long ago": ([("save", 0.3)] * 20 + [("save", 0.1)] * 16, 5.0),
    "half of the stalls of long ago": ([("save", 0.3)] * 20 + [("save", 0.1)] * 8, 5.0),
    "most stalls of long ago": ([("save", 0.3)] * 20 + [("save", 0.1)] * 7, 15.0),
    "slower steps and stalls are at most 5%": ([*IDLE, *SAVE, *upload(2, 2)], 0.5 * 4 / 0.05),
    "one step beside an upload tells nothing": ([*IDLE, *SAVE, *upload(2)], 0.0),
    "one step without tells nothing": ([*IDLE[:2], *SAVE, *upload(2, 2)], 0.0),
    "two steps without": ([*IDLE[:2], *SAVE, *upload(2, 2), ("free", 1.0)], 0.5 * 4 / 0.05),
    "the first step warms up": ([("free", 9.0), *IDLE[1:], *SAVE, *upload(2, 2)], 0.5 * 4 / 0.05),
    "the shorter of two steps beside": ([*IDLE, *SAVE, *upload(2, 4)], 0.5 * 6 / 0.05),
    "the middle of steps without": (
        [("free", 9.0), ("free", 1.0), ("free", 3.0), ("free", 1.0), *SAVE, *upload(2, 2)],
        0.5 * 4 / 0.05,
    ),
    "uploads that make steps quicker": ([*IDLE, *SAVE, *upload(0.5, 0.5)], 0.0),
    "both": ([*IDLE, ("save", 0.1), *upload(2, 2)], (0.1 + 0.5 * 4) / 0.05),
    "an earlier upload is no part": ([*IDLE, *SAVE, *upload(2, 2), *SAVE, *upload(2, 2, 2)], 0.5 * 6 / 0.05),
    "steps after an upload are no part": ([*IDLE, *SAVE, *upload(2, 2), ("free", 1.0)], 0.5 * 4 / 0.05),
    "nor is the stall": ([*IDLE, ("save", 0.1), *upload(2, 2), ("save", 0.1), *upload(2)], (0.1 + 0.5 * 2) / 0.05),
    "steps that grow longer cost an upload nothing": (
        [*IDLE * 10, *SAVE, *upload(1, 1), *[("free", 2.0)] * 16, *SAVE, *upload(*[2] * 16)],
        0.0,
    ),
    "steps beside an upload that grow longer": (
        [*IDLE, *SAVE, *upload(*[1] * 20), *SAVE, *upload(*[2] * 16)],
        0.5 * 32 / 0.05,
    ),
}  # fmt: skip
"""What has happened → the least seconds between two checkpoints."""


@pytest.mark.parametrize("name", INTERVALS)
def test_the_least_time_between_two_is_what_they_cost(name: str) -> None:
    events, seconds = INTERVALS[name]
    assert paced(events)[0].interval == pytest.approx(seconds)


DUE: dict[str, tuple[list[Event], list[bool]]] = {
    "not before two steps are known": ([("free", 1.0)] * 5, [False, False, False, True, True]),
    "not before the interval has passed": (
        [*IDLE, ("save", 0.1), *[("free", 1.0)] * 6],
        [*[False] * 7, True, True],
    ),
    "its own stall is a part of it": (
        [*IDLE, ("save", 0.1), ("free", 4.875), ("free", 0.05)],
        [False, False, False, False, True],
    ),
    "the first interval is from the start": ([*IDLE, ("free", 1.0)], [False, False, False, True]),
    "after sixteen, once there was a step without an upload": (
        [*IDLE, *([*SAVE, ("beside", 1.0)] * 15), ("beside", 1.0), ("free", 1.0), ("free", 1.0), ("free", 1.0)],
        [*[False] * 3, *[True] * 14, False, False, False, False, True],
    ),
}  # fmt: skip
"""What happens → whether a checkpoint is due at the end of each step."""


@pytest.mark.parametrize("name", DUE)
def test_one_is_due_once_it_costs_no_more_than_it_may(name: str) -> None:
    events, due = DUE[name]
    assert paced(events)[1] == due
