"""What a stage leaves for Kubernetes as it fails: tried with processes that end as stages do."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton import events

STAGE = """
from baton import events
from baton.errors import BatonError, UserError
with events.stage("tokenize"):
    {body}
"""
PLACE = "(<string>, line 5, in <module>)"


def ended(body: str, path: Path) -> int:
    environment = {events.TERMINATION_LOG: str(path), "PATH": "/usr/bin"}
    command = [sys.executable, "-c", STAGE.format(body=body)]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("body", "code", "message", "own_code"),
    [
        ("raise UserError('data.source is 3.', remedy='Name\\n  a file.')", 2, "data.source is 3. Name a file.", 2),
        ("raise BatonError('the store is gone.')", 1, "the store is gone.", 1),
        ("{}['recipe']", 1, "KeyError: 'recipe' (<string>, line 5, in <module>)", 1),
        (
            "raise MemoryError('CUDA out of memory')",
            1,
            "MemoryError: CUDA out of memory (<string>, line 5, in <module>)",
            1,
        ),
    ],
    ids=["user", "known", "fault", "memory"],
)
def test_whatever_a_stage_fails_of_is_left(body: str, code: int, message: str, own_code: int, tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()  # Kubernetes mounts it
    assert ended(body, path) == code
    assert events.read_termination_message(path.read_text()) == (message, own_code)


FULL = """try:
        open("/dev/full", "wb", buffering=0).write(b"1")
    except OSError:
        raise ValueError("I/O operation on closed file")"""


def test_a_full_disk_is_named_whatever_failed_of_it(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    assert ended(FULL, path) == 1
    where = tempfile.gettempdir()
    message = f"there is no room left at {where} (ValueError: I/O operation on closed file). Give the machine more disk"
    assert events.read_termination_message(path.read_text())[0].startswith(message)


def test_a_stage_that_succeeds_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    assert ended("pass", path) == 0
    assert path.read_bytes() == b""


def test_outside_a_pod_nothing_is_written(tmp_path: Path) -> None:
    assert ended("raise UserError('no')", tmp_path / "termination-log") == 2
    assert not list(tmp_path.iterdir())


def test_a_long_message_keeps_its_beginning_and_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv(events.TERMINATION_LOG, str(path))
    events.write_termination_message(f"found {'ü' * 5000} remedy", 2)
    assert len(path.read_bytes()) <= 4096
    message, code = events.read_termination_message(path.read_text())
    assert (message[:8], message[-8:], code) == ("found üü", "ü remedy", 2)


def test_what_kubernetes_says_itself_has_no_code() -> None:
    assert events.read_termination_message("main: OOMKilled (exit code 1)") == ("main: OOMKilled (exit code 1)", None)
