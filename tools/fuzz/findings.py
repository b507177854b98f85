"""Findings: each kind of failure once, with the input and what it raised."""

from __future__ import annotations

import hashlib
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


@dataclass(frozen=True)
class Findings:
    """A folder of findings: `<key>.bin` is an input, `<key>.txt` says what came of it."""

    folder: Path

    def failed(self, data: bytes, error: BaseException) -> None:
        """Keeps what an input has raised, unless another one has raised the same in the same place."""
        place = f"{type(error).__name__} {_place(error.__traceback__)}"
        self.add(place, data, "".join(traceback.format_exception(error)))

    def add(self, kind: str, data: bytes, told: str) -> None:
        """Keeps an input, unless there is one of its kind."""
        path = self.folder / hashlib.sha256(kind.encode()).hexdigest()[:12]
        if not path.with_suffix(".txt").exists():
            path.with_suffix(".bin").write_bytes(data)
            path.with_suffix(".txt").write_text(f"{kind}\n\n{told}", encoding="utf-8", errors="backslashreplace")

    def all(self) -> list[Path]:
        """Returns what is told of each."""
        return sorted(self.folder.glob("*.txt"))


def _place(at: TracebackType | None) -> str:
    """Returns where an error was raised: the innermost frame, and the innermost one of Baton's own."""
    frames = [(frame.filename, frame.name, frame.lineno) for frame in traceback.extract_tb(at, limit=-100)]
    ours = [frame for frame in frames if "/baton/" in frame[0]]
    shown = dict.fromkeys([*ours[-1:], *frames[-1:]])
    return " ← ".join(f"{'/'.join(file.split('/')[-3:])}:{line} {name}" for file, name, line in shown)
