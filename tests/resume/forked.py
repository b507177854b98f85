"""A drill's processes as forked legs: a second each, not eight."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import legs

from components.shared import events


def split(recipe_file: str, name: str) -> None:
    """Runs the data split."""
    from components.data_split.split import split_data

    split_data(Path(recipe_file).read_text(encoding="utf-8"), name, {})


def tokenize(run_uri: str) -> None:
    """Runs tokenize."""
    from components.tokenize.tokenization import tokenize_run

    tokenize_run(run_uri)


def train_chunk(run_uri: str, index: str, *left_out: str) -> None:
    """Runs a chunk."""
    legs.chunk(run_uri, int(index), left_out[1::2])


def checkpoint(run_uri: str, index: str) -> None:
    """Runs the checkpoint stage."""
    legs.verify_chunk(run_uri, int(index))


STAGES: dict[str, Callable[..., None]] = {
    "components.data_split": split,
    "components.tokenize": tokenize,
    "components.train_chunk": train_chunk,
    "components.checkpoint": checkpoint,
}


class Forked:
    """A stage in a forked process; see `pipelines.processes.Process`."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        reader, writer = os.pipe()
        given = {**legs._credentials(), "BATON_EVENTS": "stdout"}
        self._process = legs._context.Process(
            target=legs._redirected, args=(legs._DupFd(writer), given, STAGES[module], tuple(arguments))
        )
        self._process.start()
        os.close(writer)
        self._reader = reader
        self._printed: list[str] = []

    @property
    def pid(self) -> int:
        """Its process number."""
        return int(self._process.pid)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields what it tells, until it ends."""
        for line in self._lines():
            if event := events.parse(line):
                yield event
            else:
                self._printed.append(line)

    def _lines(self) -> Iterator[str]:
        """Yields its lines; one killed before it took the pipe leaves that open, so its end counts, not the pipe's."""
        rest = b""
        while self._reader in wait([self._reader, self._process.sentinel]):
            if not (data := os.read(self._reader, 65536)):
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") + "\n" for line in lines)
        os.close(self._reader)

    def kill(self) -> None:
        """Ends it as a node's end would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Returns its exit code."""
        self._process.join()
        return int(self._process.exitcode)

    def output(self) -> str:
        """Returns what it printed for people."""
        return "".join(self._printed)[-2000:]
