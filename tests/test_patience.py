"""Waits and retries end when they succeed, and when patience is over; not before, and not long after."""

from __future__ import annotations

import random

import pytest

from baton.errors import SkipError
from baton.runtime import RetryAttempt, Runtime, backoff, retry, through_skips


class Clock(Runtime):
    """A machine whose time goes on when somebody sleeps, and then alone."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class AwayError(Exception):
    """The store is away."""


def test_there_is_one_attempt_without_any_patience() -> None:
    slept: list[float] = []
    assert [attempt.number for attempt in backoff(0, pause=1, sleep=slept.append)] == [1]
    assert slept == []


def test_pauses_grow_to_the_longest_one() -> None:
    slept: list[float] = []
    tries = backoff(1000, pause=1, growth=2, longest=5, sleep=slept.append)
    for _ in range(6):
        next(tries)
    assert slept == [1, 2, 4, 5, 5]


def test_patience_ends_and_no_attempt_begins_after_it() -> None:
    clock = Clock()
    began = [clock.monotonic() for _ in backoff(0.35, pause=0.1, runtime=clock)]
    assert began == pytest.approx([0, 0.1, 0.2, 0.3])


def test_time_spent_in_an_attempt_counts() -> None:
    clock, lasts = Clock(), []
    for attempt in backoff(0.35, pause=0.1, runtime=clock):
        clock.sleep(0.1)
        lasts.append(attempt.is_last)
    assert lasts == [False, True]


def test_pauses_vary_and_leave_the_global_generator_alone() -> None:
    state = random.getstate()
    slept: list[float] = []
    tries = backoff(1000, pause=1, jitter=0.25, sleep=slept.append)
    for _ in range(50):
        next(tries)
    assert random.getstate() == state
    assert min(slept) >= 0.75
    assert max(slept) <= 1.25
    assert len(set(slept)) > 40


def test_an_operation_is_tried_until_it_succeeds() -> None:
    failing = [AwayError("1"), AwayError("2")]
    failures: list[tuple[str, int]] = []

    def operation() -> str:
        if failing:
            raise failing.pop(0)
        return "here"

    def note(error: AwayError, attempt: RetryAttempt) -> None:
        failures.append((str(error), attempt.number))

    assert retry(operation, AwayError, backoff(1, pause=0.001), note) == "here"
    assert failures == [("1", 1), ("2", 2)]


def test_the_last_failure_is_raised_once_patience_is_over() -> None:
    numbers: list[int] = []

    def operation() -> None:
        numbers.append(len(numbers) + 1)
        raise AwayError(str(numbers[-1]))

    with pytest.raises(AwayError) as raised:
        retry(operation, AwayError, backoff(0.05, pause=0.01, runtime=Clock()), lambda *_: None)
    assert str(raised.value) == str(numbers[-1])
    assert len(numbers) == 6


def test_another_error_is_raised_at_once() -> None:
    numbers: list[int] = []

    def operation() -> None:
        numbers.append(1)
        raise KeyError("other")

    with pytest.raises(KeyError):
        retry(operation, AwayError, backoff(10, pause=0.001), lambda *_: None)
    assert len(numbers) == 1


def test_training_begins_again_after_each_step_that_it_finds() -> None:
    found = [SkipError(f"step {step} has no loss.", step=step) for step in (3, 9, 3)]

    def train() -> str:
        if found:
            raise found.pop(0)
        return "done"

    assert through_skips(train) == "done"


def test_a_step_that_is_found_again_ends_it() -> None:
    """What was written down is not heeded: whatever the reason, it would not end."""
    times: list[int] = []

    def train() -> None:
        times.append(1)
        raise SkipError("step 3 has no loss.")

    with pytest.raises(SkipError):
        through_skips(train)
    assert len(times) == 2
