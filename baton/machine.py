"""This machine: its GPU, the memory and caches of a process, and the proxies of its environment.

Clients differ in how they read `NO_PROXY`; the rules here are the same for every client.
"""

import contextlib
import ctypes
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from baton.errors import BatonError, NodeError, ProcessLostError, UserError

# Environment variable of a cluster's pods that run the model: number of GPUs that they have asked for.
PROMISED_GPUS = "BATON_PROMISED_GPUS"
# Environment variable: `0` gives each process of a stage, and each stage of this machine, its own interpreter, as all
# have outside Linux. Its former name `BATON_WARM` is read where it is not set.
FORKSERVER = "BATON_FORKSERVER"
ENDS_WITH = "BATON_ENDS_WITH"  # environment variable: number of the process whose end is this one's, too
_PDEATHSIG = 1  # of prctl(2)
CGROUP = Path("/sys/fs/cgroup")
_M_ARENA_MAX = -8  # of mallopt(3)


@dataclass(frozen=True)
class GPU:
    name: str  # the driver's
    bytes: int  # of memory


def forks_stages() -> bool:
    """Tells whether processes may be forked from one that has imported their libraries; see `FORKSERVER`."""
    return os.environ.get(FORKSERVER, os.environ.get("BATON_WARM")) != "0"


def number_of(variable: str, default: float) -> float:
    """Returns the number in an environment variable, else the default; a text that is none is a UserError."""
    text = os.environ.get(variable) or str(default)
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise UserError(
        f"the environment variable {variable} is {text!r}, expected a number.", remedy="Set a number, or unset it."
    )


def end_with_parent(parent: int = 0) -> None:
    """Has Linux kill this process when its parent is killed, given by its number or by `ENDS_WITH`: two would train."""
    number = parent or int(os.environ.pop(ENDS_WITH, "0"))
    if number and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != number:  # it was killed before that
            os.kill(os.getpid(), signal.SIGKILL)


def share_arenas() -> None:
    """Limits later threads to two of glibc's arenas, where libc is glibc."""
    # Freed memory stays with its thread's arena: those of a store's client held up to 250 MB of a chunk's peak.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_ARENA_MAX, 2)


def gpu() -> GPU | None:
    """Returns the first CUDA device, None where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return GPU(properties.name, properties.total_memory)


def commit() -> str:
    """Returns the commit of the Git repository here, `-dirty` after it where files have changed; empty for none."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "" if done.returncode else done.stdout.strip()


def require_gpus(image: str) -> None:
    """Refuses a pod that sees fewer GPUs than promised; it would train on CPUs, at a GPU's price."""
    promised = int(os.environ.get(PROMISED_GPUS) or 0)
    if not promised:
        return
    import torch

    seen = torch.cuda.device_count()
    if seen >= promised:
        return
    runtimes = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next((f"{name} {version}" for name, version in runtimes.items() if version), None)
    raise NodeError(
        f"this pod was promised {promised} GPU{'s'[: promised - 1]} and sees {seen}: driver {_driver()}, "
        f"torch {torch.__version__} built for {build or 'CPUs alone'}, image {image}.",
        remedy="Check the node's driver and device plugin; another node may do better."
        if build
        else "Set resources.image to an image whose torch is built for the GPU; images/Dockerfile makes one.",
    )


def _driver() -> str:
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "none"
    return next((word for word in line.split() if word[0].isdigit()), line)


def cache_dir() -> str:
    """Returns the folder for downloads and notes: `BATON_CACHE`, or `baton` in the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("BATON_CACHE") or os.path.join(caches, "baton")


def settle_home() -> None:
    """Sets a folder for caches where the user has no writable home, as with an arbitrary user id."""
    # Libraries look for it when they are imported, and some fail without.
    home = os.path.expanduser("~")
    is_there = os.path.isdir(home)
    if is_there and (os.access(home, os.W_OK) or os.path.isdir(os.path.join(home, ".cache"))):
        return
    variable = "XDG_CACHE_HOME" if is_there else "HOME"
    if is_there and os.environ.get(variable):
        return
    folder = os.path.join(tempfile.gettempdir(), f"baton-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():  # somebody else's trap
        folder = tempfile.mkdtemp(prefix="baton-")
    os.environ[variable] = folder


def has_mps() -> bool:
    """Tells whether torch can use Apple's GPU."""
    import torch

    return bool(torch.backends.mps.is_available())


def total_memory(cgroup: Path = CGROUP) -> int:
    """Returns this process's memory in bytes: the machine's, or a container's limit."""
    import psutil

    return min(int(psutil.virtual_memory().total), _number(cgroup / "memory.max") or 2**63)


def available_memory(cgroup: Path = CGROUP) -> int:
    """Returns this process's free memory in bytes; a container's cache of files counts as free."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    return min(free, max(limit - used + _field(cgroup / "memory.stat", "inactive_file"), 0))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def without_memory(error: ProcessLostError) -> BatonError:
    """Returns the error of a process killed for want of memory, which a fresh one would lack too."""
    remedy = "Raise resources.memory, or lower training.micro_batch_size."
    return BatonError(f"{error.message} There was no memory left.", remedy=remedy)


def oom_kills(cgroup: Path = CGROUP) -> int:
    """Returns the number of this container's processes that the kernel has killed for want of memory."""
    return _field(cgroup / "memory.events", "oom_kill") or _field(cgroup / "memory" / "memory.oom_control", "oom_kill")


def _field(path: Path, name: str) -> int:
    """Returns a figure of a file of lines `NAME NUMBER`, 0 where there is none."""
    try:
        lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return next((int(line[1]) for line in lines if line[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0


class Proxy(NamedTuple):
    """A proxy, whose address may hold a password, and the environment variable that names it."""

    url: str
    variable: str

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} ({self.variable})"


def named_proxy(url: str) -> Proxy | None:
    """Returns the proxy that the environment names for an address, whatever `NO_PROXY`."""
    for name in (f"{urlsplit(url).scheme}_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if proxy := os.environ.get(variable):
                return Proxy(proxy if "://" in proxy else f"http://{proxy}", variable)
    return None


def describe_proxy(url: str) -> str | None:
    """Returns a line on the proxy of an address, None where the environment names none."""
    if named_proxy(url) is None:
        return None
    proxy = proxy_for(url)
    return f"{url} is asked {f'through {proxy}' if proxy else 'straight, by NO_PROXY'}"


def proxy_for(url: str) -> Proxy | None:
    """Returns the proxy of requests to an address, None where they go straight."""
    proxy = named_proxy(url)
    if proxy is None:
        return None
    from urllib.request import proxy_bypass  # both imported only where there is a proxy

    from requests.utils import should_bypass_proxies

    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    # The first knows ranges of addresses, the second ports of an address, and default ports.
    is_straight = should_bypass_proxies(url, no_proxy=None) or proxy_bypass(f"{parts.hostname}:{port}")
    return None if is_straight else proxy
