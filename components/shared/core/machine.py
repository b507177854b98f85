"""Finds this machine's GPU, and the memory of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class GPU:
    """A CUDA device.

    Attributes:
        name: As the driver calls it.
        bytes: Its memory.
    """

    name: str
    bytes: int


def gpu() -> GPU | None:
    """Returns the first CUDA device, None where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return GPU(properties.name, properties.total_memory)


def has_mps() -> bool:
    """Tells whether torch can use Apple's GPU."""
    import torch

    return bool(torch.backends.mps.is_available())


def total_memory(cgroup: Path = CGROUP) -> int:
    """Returns the bytes of memory there are for this process: the machine's, or a container's limit."""
    return min(int(psutil.virtual_memory().total), _number(cgroup / "memory.max") or 2**63)


def available_memory(cgroup: Path = CGROUP) -> int:
    """Returns the bytes of memory that are free for this process; a container's cache of files counts as free."""
    free = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    return min(free, max(limit - used + _field(cgroup / "memory.stat", "inactive_file"), 0))


def _number(path: Path) -> int | None:
    """Returns the number in a file of the cgroup, None where there is none, such as no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def oom_kills(cgroup: Path = CGROUP) -> int:
    """Returns how many processes of this container the kernel has killed for want of memory."""
    return _field(cgroup / "memory.events", "oom_kill") or _field(cgroup / "memory" / "memory.oom_control", "oom_kill")


def _field(path: Path, name: str) -> int:
    """Returns a figure of a file with a name and a number a line; 0 where there is none."""
    try:
        lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return next((int(line[1]) for line in lines if line[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0
