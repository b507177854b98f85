"""One process that fuzzes: `python -m tools.fuzz.process TARGET FOLDER [libFuzzer's options]`.

An exception is kept as a finding and fuzzing goes on; so is an input that takes more memory than its target may. An
input that takes too long ends the process by libFuzzer's alarm, and memory that grows without an end by its limit:
`tools.fuzz.driver` makes findings of these, and starts another process.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import atheris

from tools.fuzz.findings import Findings
from tools.fuzz.target import Target, load

INSTRUMENTED = ["baton", "yaml", "tools.fuzz.planted"]
"""Packages of which libFuzzer sees which branches an input takes."""
_PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")
_NOW = re.compile(rb"VmRSS:\s+(\d+) kB")


def _reset_peak() -> int:
    """Has Linux measure the peak from here on, and returns the memory in KiB that this process has now."""
    Path("/proc/self/clear_refs").write_bytes(b"5")
    return _status(_NOW)


def _status(entry: re.Pattern[bytes]) -> int:
    match = entry.search(Path("/proc/self/status").read_bytes())
    assert match
    return int(match[1])


class Watched:
    """A target whose failures are kept.

    Args:
        target: The target.
        folder: Where `findings` and `peak.json` go.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self._target, self._folder = target, folder
        self._findings = Findings(folder / "findings")
        self._most = 0

    def __call__(self, data: bytes) -> None:
        """Reads an input."""
        before = _reset_peak()
        try:
            self._target.run(data)
        except Exception as error:
            self._findings.failed(data, error)
        taken = _status(_PEAK) - before
        if taken > self._most:
            self._most = taken
            (self._folder / "peak.json").write_text(json.dumps({"kib": taken, "bytes": len(data)}))
        if taken > self._target.mebibytes * 1024:
            told = f"{len(data)} bytes took {taken // 1024} MiB, at most {self._target.mebibytes}"
            self._findings.add(f"memory of some 2**{taken.bit_length() - 1} KiB", data, told)


def _mutator(target: Target) -> Callable[[bytes, int, int], bytes]:
    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.8:
            with contextlib.suppress(Exception):  # what cannot be read as what it should be is changed by its bytes
                return target.mutate(data, rng, atheris.Mutate)[:most]
        return atheris.Mutate(data, most)

    return mutate


def main() -> None:
    """Fuzzes until libFuzzer's options say that it is enough."""
    name, folder, *options = sys.argv[1:]
    place = Path(folder)
    with atheris.instrument_imports(include=INSTRUMENTED):
        target = load(name)
    seeds = place / "seeds"
    with contextlib.suppress(FileExistsError):
        seeds.mkdir()
        for number, seed in enumerate(target.seeds()):
            (seeds / f"{number:04d}").write_bytes(seed)
    # libFuzzer looks at the peak, which a process has from the one that began it.
    inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    limits = [f"-timeout={target.seconds}", f"-max_len={target.longest}", f"-rss_limit_mb={inherited + target.whole}"]
    # What is imported by the first inputs is not what an input takes.
    for seed in target.seeds():
        with contextlib.suppress(Exception):
            target.run(seed)
    corpus = [str(place / "corpus"), str(seeds)]
    atheris.Setup([sys.argv[0], *limits, *options, *corpus], Watched(target, place), custom_mutator=_mutator(target))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
