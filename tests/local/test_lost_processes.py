"""A chunk whose process is lost, in kfp's local engine: the stage trains on with a fresh one, to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[1] / "recipes/scratch.yaml"
HOOK = Path(__file__).parents[1] / "support/hooks/lost.py"
BATON = str(Path(sys.executable).parent / "baton")


@pytest.fixture
def mark() -> Iterator[Path]:
    """A file below the folder for temporary files, where the hook notes each time."""
    path = Path(tempfile.gettempdir(), f"baton-lost-{uuid.uuid4().hex}")
    yield path
    path.unlink(missing_ok=True)


def _run(folder: Path, *settings: str) -> tuple[int, dict[str, Any], str]:
    own = ["training.epochs=null", "training.max_steps=6", "chunks.count=2", "chunks.checkpoint_every=1"]
    command = [BATON, "run", str(RECIPE), "--run", "r", "--store", str(folder), "--output", "json"]
    command += [word for setting in (*own, *settings) for word in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), " ".join(done.stderr.split())


def _hook(ends: str, mark: Path) -> tuple[str, str]:
    callback = {"use": "lost:Lost", "options": {"ends": ends, "mark": mark.name}}
    return f"hooks.source={HOOK}", f"hooks.callbacks={json.dumps([callback])}"


def _digests(found: dict[str, Any]) -> dict[int, str]:
    return {row["step"]: row["digest"] for row in found["checkpoints"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Digests of the same training without the hook."""
    code, found, told = _run(tmp_path_factory.mktemp("undisturbed"))
    assert code == 0, told
    return _digests(found)


@pytest.mark.parametrize("ends", ["killed", "device", "store"])
def test_a_lost_process_is_followed_by_a_fresh_one_in_its_stage(
    ends: str, mark: Path, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    code, found, told = _run(tmp_path, *_hook(ends, mark))
    assert code == 0, told
    assert len(mark.read_text().splitlines()) == 1
    assert _digests(found)[6] == undisturbed[6]


def test_a_mistake_does_not_start_twice(mark: Path, tmp_path: Path) -> None:
    code, _, told = _run(tmp_path, *_hook("mistake", mark))
    assert code == 1
    assert "a mistake of the user's own" in told
    assert len(mark.read_text().splitlines()) == 1
