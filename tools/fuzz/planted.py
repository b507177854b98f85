"""Targets with a fault each, by which a fuzzer is known to find faults; three bytes lead to it, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from tools.fuzz.target import Mutate, Target


def _is_reached(data: bytes) -> bool:
    # A branch for each byte: coverage leads from one to the next, chance alone does not come there.
    if data[:1] != b"B":
        return False
    if data[1:2] != b"A":
        return False
    return data[2:3] == b"D"


def _raise(data: bytes) -> None:
    if _is_reached(data):
        raise KeyError("planted")


def _sleep(data: bytes) -> None:
    if _is_reached(data):
        time.sleep(60)


def _allocate(data: bytes) -> None:
    if _is_reached(data):
        len(b"x" * (len(data) + 3 * 2**27))


_KEPT: list[bytes] = []


def _grow(data: bytes) -> None:
    while _is_reached(data):
        _KEPT.append(b"x" * 2**26)


def _seeds() -> Iterator[bytes]:
    yield b"..."


def _mutate(data: bytes, rng: Random, by_bytes: Mutate) -> bytes:
    return by_bytes(data, 8)


TRACEBACK, MEMORY, ENDLESS = (
    Target(run=run, seeds=_seeds, mutate=_mutate, whole=512) for run in (_raise, _allocate, _grow)
)
HANG = Target(run=_sleep, seeds=_seeds, mutate=_mutate, seconds=1)
