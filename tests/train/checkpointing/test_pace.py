"""Checkpoints that follow each other cost what they may, and no more."""

from __future__ import annotations

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
