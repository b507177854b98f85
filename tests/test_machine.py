"""Memory of this process: the machine's, or what a container leaves of it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from baton import machine


def cgroup(folder: Path, **files: str) -> Path:
    """Writes files as the kernel does."""
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="ascii")
    return folder


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    found = cgroup(
        tmp_path,
        memory_max="4000000\n",
        memory_current="3000000\n",
        memory_stat="anon 2000000\ninactive_file 700000\nactive_file 300000\n",
    )
    assert machine.total_memory(found) == 4_000_000
    assert machine.available_memory(found) == 1_700_000


UNLIMITED = {"no limit": {"memory_max": "max\n", "memory_current": "5\n"}, "no cgroup": {}}


@pytest.mark.parametrize("files", UNLIMITED.values(), ids=UNLIMITED)
def test_without_a_limit_the_machine_s_counts(files: dict[str, str], tmp_path: Path) -> None:
    found = cgroup(tmp_path, **files)
    assert machine.total_memory(found) == psutil.virtual_memory().total
    assert machine.available_memory(found) <= machine.total_memory(found)


def test_a_container_that_is_full_has_nothing(tmp_path: Path) -> None:
    assert machine.available_memory(cgroup(tmp_path, memory_max="100", memory_current="150")) == 0


ARENAS = """
import ctypes, sys, threading
from baton import machine

if sys.argv[1] == "shared":
    machine.share_arenas()
libc, meet = ctypes.CDLL(None), threading.Barrier(8)
libc.malloc.restype = ctypes.c_void_p
def allocate():
    libc.malloc(100)
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library is not glibc")
def test_threads_share_few_arenas() -> None:
    def arenas(how: str) -> int:
        return subprocess.run([sys.executable, "-c", ARENAS, how], capture_output=True, text=True).stdout.count(
            "<heap nr"
        )

    assert arenas("shared") == 2
    assert arenas("own") > 2, "the control"
