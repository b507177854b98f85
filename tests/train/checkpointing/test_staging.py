"""Where checkpoints are staged: memory, else disk, else nowhere, and what is left there goes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton import events
from baton.checkpoint import staging
from baton.checkpoint.staging import LEAST_HELD, LEFT_FREE, Staging, is_held
from baton.checkpoint.store import Checkpoint, CheckpointMeta
from baton.store.manifest import FileEntry, Manifest

MB = 1_000_000


class Machine:
    """What passes for a machine's memory and disk."""

    def __init__(self, folder: Path) -> None:
        self.memory, self.disk = folder / "memory", folder / "disk"
        self.free = {str(self.memory): 1000 * MB, str(self.disk): 1000 * MB}
        self.available = LEFT_FREE + 1000 * MB
        for place in (self.memory, self.disk):
            place.mkdir()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path)
    monkeypatch.setattr(staging, "MEMORY", str(found.memory))
    monkeypatch.setattr(tempfile, "tempdir", str(found.disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=found.free[str(place)]))
    monkeypatch.setattr(staging.psutil, "virtual_memory", lambda: SimpleNamespace(available=found.available))
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(events, "emit", found.append)
    return found


def places(staging: Staging, machine: Machine, size: int) -> list[tuple[str, bool]]:
    """Returns what is offered, by the name of the place."""
    names = {str(machine.memory): "memory", str(machine.disk): "disk"}
    return [(names[os.path.dirname(folder)], fits) for folder, fits in staging.places(size)]


def test_memory_comes_first_then_disk_then_the_roomier_file_by_file(machine: Machine, told: list[Any]) -> None:
    with Staging() as staged:
        machine.free[str(machine.disk)] += 1
        assert places(staged, machine, 900 * MB) == [("memory", True), ("disk", True), ("disk", False)]
        machine.free[str(machine.memory)] = 980 * MB
        assert places(staged, machine, 900 * MB)[0] == ("disk", True), "a tenth more is asked for than is expected"
        machine.free[str(machine.disk)] = 970 * MB
        assert places(staged, machine, 900 * MB) == [("memory", False)]
    assert [event.place for event in told] == [str(machine.disk), "store"] * 2


def test_it_is_told_once_each_time_that_the_place_changes(machine: Machine, told: list[Any]) -> None:
    with Staging() as staged:
        for _ in range(2):
            next(staged.places(MB))
        assert told == []
        machine.free[str(machine.memory)] = 0
        for _ in range(2):
            next(staged.places(MB))
        machine.free[str(machine.disk)] = 0
        for _ in range(2):
            next(staged.places(MB))
        machine.free[str(machine.memory)] = 1000 * MB
        next(staged.places(MB))
    assert [event.place for event in told] == [str(machine.disk), "store", str(machine.memory)]
    assert "has no room for a checkpoint of 1 MB: it is staged in" in told[0].reason
    assert "it is uploaded file by file" in told[1].reason
    assert "has room for a checkpoint of 1 MB again" in told[2].reason


def test_memory_that_is_free_but_not_available_does_not_count(machine: Machine) -> None:
    with Staging() as staged:
        machine.available = LEFT_FREE + 99 * MB + 11 * MB
        assert places(staged, machine, 100 * MB)[0] == ("memory", True)
        machine.available -= 1
        assert places(staged, machine, 100 * MB)[0] == ("disk", True)
        machine.available = 0
        assert places(staged, machine, 100 * MB)[0] == ("disk", True), "which needs no memory"


def test_a_place_that_cannot_be_written_is_passed_over(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(machine.memory) and access(path, mode))
    with Staging() as staged:
        assert places(staged, machine, MB) == [("disk", True), ("disk", False)]
        assert os.path.dirname(staged.folder(MB)) == str(machine.disk)


def test_downloads_go_where_they_fit_and_all_goes_at_the_end(machine: Machine) -> None:
    with Staging() as staged:
        inside, beside = staged.folder(10 * MB), staged.folder(2000 * MB)
        assert os.path.dirname(inside) == str(machine.memory)
        assert os.path.dirname(beside) == str(machine.disk)
        assert staged.folder(MB) == inside, "one folder in each place"
        assert f"-{os.getpid()}-" in inside
        download, other = Path(inside, "from-3"), machine.disk / "theirs"
        for folder in (download, other):
            folder.mkdir()
        staged.drop(str(download))
        staged.drop(str(other))
        assert not download.exists()
        assert other.exists(), "what lies elsewhere is not ours to remove"
    assert not os.path.exists(inside)
    assert not os.path.exists(beside)


def _checkpoint(*sizes: int) -> Checkpoint:
    files: dict[str, FileEntry] = {
        f"folder/{number}.bin": {"size": size, "sha256": ""} for number, size in enumerate(sizes)
    }
    return Checkpoint(7, Manifest(kind="checkpoint", folder="a", files=files), CheckpointMeta(digest=""))


def test_a_download_that_one_process_reads_is_held_in_memory_and_needs_no_room(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = [LEFT_FREE + 110 * MB]
    monkeypatch.setattr(staging.machine, "available_memory", lambda: available[0])
    machine.available, machine.free[str(machine.memory)] = LEFT_FREE, 0
    checkpoint = _checkpoint(100 * MB - LEAST_HELD + 1, LEAST_HELD - 1)
    with Staging() as staged:
        folder = Path(staged.incoming(checkpoint, alone=True))
        assert (folder.name, folder.parent.parent) == ("from-7", machine.memory)
        assert [is_held(str(folder / "folder" / f"{number}.bin")) for number in (0, 1)] == [True, False], "large ones"
        os.symlink("/etc/hosts", folder / "other")
        assert not is_held(str(folder / "other"))
        assert len(staged._held) == 1
        for alone, memory in ((True, available[0] - 1), (False, available[0])):
            available[0] = memory
            found = Path(staged.incoming(checkpoint, alone=alone))
            assert (found.name, found.parent.parent) == ("from-7", machine.disk)
            assert staged._held == [], "the one before is closed"


def test_a_superseded_checkpoint_ends_its_work() -> None:
    pending = staging.PendingCheckpoint(step=3, folder="")
    pending.check()
    pending.superseded.set()
    with pytest.raises(staging.SupersededError, match="a newer checkpoint takes the place of step 3's"):
        pending.check()


def test_what_killed_processes_left_is_removed_and_what_others_use_stays(machine: Machine) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    names = {
        "dead": f"baton-{host}-{ended.pid}-abc",
        "alive": f"baton-{host}-{os.getpid()}-abc",
        "of another pod": f"baton-elsewhere-{ended.pid}-abc",
        "of no process": f"baton-{host}-x-abc",
    }
    for place in (machine.memory, machine.disk):
        for name in names.values():
            (place / name).mkdir()
    with Staging():
        pass
    for place in (machine.memory, machine.disk):
        assert {path.name for path in place.iterdir()} == set(names.values()) - {names["dead"]}
