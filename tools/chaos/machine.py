"""A small machine: folders of their own size for memory, disk and the node's cache, which can be full."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

SIZE = "48m"
BALLAST = "ballast"
PLACES = {
    "memory": ("memory",),
    "disk": ("disk",),
    "memory and disk": ("memory", "disk"),
    "node cache": ("cache",),
}


class Machine:
    """Folders below one, each a tmpfs where that can be mounted; else they are never full.

    Args:
        folder: An empty folder, or one that is not there.

    Attributes:
        can_fill: Whether they can be full.
        ran: Numbers of the processes that ran on it, and when each ended: numbers are given again.
    """

    def __init__(self, folder: Path) -> None:
        self.memory, self.disk, self.cache = folder / "memory", folder / "disk", folder / "cache"
        self._mounted: list[Path] = []
        self.ran: dict[int, float] = {}
        for place in (self.memory, self.disk, self.cache):
            place.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
            if os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0:
                self._mounted.append(place)
        self.can_fill = len(self._mounted) == 3

    def close(self) -> None:
        """Gives its folders back."""
        for place in self._mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)

    def fill(self, what: str) -> None:
        """Lets nothing more be written to a place."""
        for name in PLACES[what] if self.can_fill else ():
            with contextlib.suppress(OSError), open(getattr(self, name) / BALLAST, "wb", buffering=0) as file:
                while file.write(b"\0" * 65536):
                    pass

    def empty(self) -> None:
        """Takes what fills them away."""
        for place in (self.memory, self.disk, self.cache):
            (place / BALLAST).unlink(missing_ok=True)

    def left(self) -> list[str]:
        """Returns what is left in memory and on disk, in `/dev/shm`, and which processes run: none should."""
        lines = [f"{place.name}/{entry.name}" for place in (self.memory, self.disk) for entry in place.iterdir()]
        lines += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if self._is_ours(name)]
        until = time.monotonic() + 5
        while (running := self._running()) and time.monotonic() < until:
            time.sleep(0.1)
        return lines + running

    def _is_ours(self, name: str) -> bool:
        numbers = {int(part) for part in name.replace("-", "_").split("_") if part.isdigit()}
        with contextlib.suppress(FileNotFoundError):
            changed = os.stat(f"/dev/shm/{name}").st_ctime
            return any(changed < self.ran[number] + 1 for number in numbers & self.ran.keys())
        return False

    def _running(self) -> list[str]:
        lines = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                # Whoever has a group's number and began after the group's first process had ended is not of it.
                is_ours = process.create_time() < self.ran.get(os.getpgid(process.pid), 0.0) + 1
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(f"process {process.pid}: {' '.join(process.cmdline())[-80:]}")
        return lines
