"""What all rows share: the server, the folders, both sides, and how many rounds there are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton import events
from benchmarks import OPPONENTS
from benchmarks.process import Event, watch
from benchmarks.server import Server
from benchmarks.sizes import Size

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for.

    Attributes:
        rounds: Times that each side is measured; `ROUNDS`, or one where `quick`, when None.
        large: The model whose checkpoints are measured.
        small: The model where a checkpoint's size is not the point.
        quick: Fewer steps and shorter times: numbers that mean nothing, to see that it works.
    """

    rounds: int | None
    large: Size
    small: Size
    quick: bool


class Bench:
    """One benchmark.

    Args:
        options: What was asked for.
        server: What it is measured against.
    """

    def __init__(self, options: Options, server: Server) -> None:
        self.options, self.server = options, server
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.memory = tempfile.mkdtemp(prefix="baton-bench-", dir=place)
        self.work = tempfile.mkdtemp(prefix="baton-bench-")
        self._payloads: dict[str, str] = {}
        self._count = 0

    def close(self) -> None:
        """Removes what it wrote here."""
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def rounds(self) -> Iterator[int]:
        """Yields the numbers of the rounds, from 1, and prints which one runs."""
        count = self.options.rounds or (1 if self.options.quick else ROUNDS)
        for number in range(1, count + 1):
            self.say(f"round {number} of {count}")
            yield number

    def say(self, text: str) -> None:
        """Tells on standard error how far it is."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def fresh_folder(self, kind: str) -> str:
        """Returns an empty folder in memory of a name that was never used."""
        self._count += 1
        folder = f"{self.memory}/{kind}-{self._count}"
        os.makedirs(folder)
        return folder

    def touch_memory(self, size: Size) -> None:
        """Takes memory for four checkpoints and gives it back.

        A virtual machine may have lent free memory to its neighbours: whoever touches it first waits for it, which made
        the side that came first after a pause twice as slow.
        """
        code = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE)"
        subprocess.run([sys.executable, "-c", code, str(int(4 * size.bytes))], check=True)

    def payload(self, size: Size) -> str:
        """Returns a folder with files as large as those of a checkpoint, of bytes that cannot be compressed."""
        if size.name not in self._payloads:
            folder = self._payloads[size.name] = self.fresh_folder("payload")
            for name, share in (("model.safetensors", 4), ("optimizer.pt", 8)):
                left = share * size.parameters
                with open(f"{folder}/{name}", "wb") as file:
                    while left > 0:
                        left -= file.write(os.urandom(min(left, 2**24)))
        return self._payloads[size.name]

    def drop_payloads(self) -> None:
        """Gives the memory of all payloads back."""
        for folder in self._payloads.values():
            shutil.rmtree(folder)
        self._payloads.clear()

    def transfer(self, operation: str, *arguments: object) -> Event:
        """Moves something in a fresh process; returns `seconds`, `cpu` seconds, and how `busy` all cores were."""
        trace = watch(["-m", "benchmarks.transfer", operation, *map(str, arguments)], parse_mark)
        return trace.all("moved")[0]

    def transfer_down(self, operation: str, source: str, *arguments: object) -> Event:
        """Fetches something into a folder that is removed at once."""
        folder = self.fresh_folder("down")
        try:
            more = [str(argument) for argument in arguments]
            if operation == "fetch":
                return self.transfer(operation, source, *more, f"{folder}/files")
            return self.transfer(operation, source, f"{folder}/files", *more)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def raw_down(self, uri: str) -> dict[str, Event]:
        """Fetches by all raw readers, by name."""
        found = {f"obstore, {n} ranges": self.transfer_down("raw_get", uri, n) for n in (4, 8)}
        found["boto3"] = self.transfer_down("boto3_get", uri)
        if (OPPONENTS / "runai_model_streamer").is_dir():
            found["Run:ai"] = self.transfer_down("runai_get", uri)
        return found

    def raw_up(self, folder: str, prefix: str) -> float:
        """Returns the seconds in which a raw writer sends files, which are then removed."""
        self.server.expect(sum(entry.stat().st_size for entry in os.scandir(folder)))
        seconds = float(self.transfer("raw_put", folder, f"{self.server.uri}/{prefix}")["seconds"])
        self.server.clear(prefix)
        return seconds


def parse_event(line: str) -> Event | None:
    """Returns what a stage of Baton's tells in a line, with its time."""
    return json.loads(line.removeprefix(events.MARK)) if line.startswith(events.MARK) else None


def parse_mark(line: str) -> Event | None:
    """Returns the event in a line of the benchmark's own processes."""
    if not line.startswith('{"mark"'):
        return None
    found: dict[str, Any] = json.loads(line)
    return {"event": found.pop("mark"), **found}


def best(found: dict[str, Event]) -> float:
    """Returns the seconds of the fastest."""
    return min(float(event["seconds"]) for event in found.values())
