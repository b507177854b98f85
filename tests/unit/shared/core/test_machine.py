"""Memory of this process: the machine's, or what a container leaves of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from baton.components.shared.core import machine


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
