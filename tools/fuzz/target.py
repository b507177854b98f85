"""What a fuzzer needs to know of the code that it feeds."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.errors import BatonError

Mutate = Callable[[bytes, int], bytes]
"""Changes bytes as libFuzzer does, up to a size."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Code that reads what somebody else has written.

    Attributes:
        run: Reads an input. What it raises is a finding.
        seeds: Yields the inputs to begin with.
        mutate: Changes an input by what it means, with libFuzzer's own mutation for bytes that mean nothing.
        seconds: Longest time for one input, on a machine that is busy with other things.
        mebibytes: Most memory for one input, beyond what the process had before.
        longest: Bytes of the longest input.
        whole: Mebibytes at which its process is ended, libraries included.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    mutate: Callable[[bytes, Random, Mutate], bytes]
    seconds: int = 20
    mebibytes: int = 128
    longest: int = 2**15
    whole: int = 4096


@functools.cache
def scratch() -> Path:
    """Returns a folder for what an input is written to; the driver removes it with the others of its process."""
    return Path(tempfile.mkdtemp(prefix="baton-fuzz-"))


def require_message(error: BatonError) -> None:
    """Checks that an error says something, and not without end."""
    assert len(error.message) > 10, f"{error!r} says nothing"
    assert any(sign in str(error) for sign in "'\":."), f"{error} names no value"
    assert len(str(error)) < 2**20, "a message of more than a MiB"


TARGETS = {name: f"tools.fuzz.targets.{name}:TARGET" for name in ("recipe", "rows", "manifest")}
"""Where each target is, by its name."""
PLANTED = {name: f"tools.fuzz.planted:{name.upper()}" for name in ("traceback", "hang", "memory", "endless")}
"""Targets with a fault, which a fuzzer that works must find."""


def load(name: str) -> Target:
    """Imports a target."""
    module, _, attribute = (TARGETS | PLANTED)[name].partition(":")
    target = getattr(importlib.import_module(module), attribute)
    assert isinstance(target, Target)
    return target
