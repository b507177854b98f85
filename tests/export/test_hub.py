"""A push to the Hub: what arrives, once, and what is said when it is refused. Each push is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.export.hub_server import TOKEN, HubServer

FILES = {"README.md": b"# m\n", "config.json": b"{}", "model.safetensors": bytes(range(256)) * 64}
PUSH = """
import sys
from baton.export import export as hub
from baton.store import bundle as bundles
from baton.store.manifest import read_manifest
from baton.errors import BatonError
from baton.recipe.evaluation import Hub
from baton.runs.run import Run
from baton.store.storage import Storage

run = Run(Storage(sys.argv[1]), "r")
manifest = read_manifest(run.storage, run.path("export"))
folder = bundles.fetch(run.storage, run.path("export"), manifest, "unused")
try:
    print(hub.push_to_hub(run, Hub(repo="me/m", revision=sys.argv[2]), manifest, folder).commit)
except BatonError as error:
    sys.exit(f"{error.exit_code} {error}")
"""


@pytest.fixture
def server() -> Iterator[HubServer]:
    found = HubServer()
    yield found
    found.stop()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with an export."""
    return _exported(tmp_path, FILES)


def _exported(tmp_path: Path, files: dict[str, bytes]) -> Run:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    run = Run(Storage(str(tmp_path / "store")), "r")
    bundle.publish(run.storage, run.path("export"), str(folder), kind="model", meta={})
    return run


def _push(run: Run, endpoint: str, token: str | None, revision: str = "main") -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **({"HF_TOKEN": token} if token else {})}
    home = {"HF_HOME": str(Path(run.storage.uri("")).parent / "hf")}
    command = [sys.executable, "-c", PUSH, run.storage.uri(""), revision]
    return subprocess.run(command, env={**kept, **given, **home}, text=True, capture_output=True, check=False)


def test_files_arrive_once(run: Run, server: HubServer) -> None:
    done = _push(run, server.endpoint, TOKEN, "candidate")
    assert (done.returncode, done.stdout.strip()) == (0, "a" * 40), done.stderr
    assert server.repos == {"me/m": True}  # private
    assert server.branches == ["candidate"]
    assert server.files == FILES
    again = _push(run, server.endpoint, TOKEN, "candidate")
    assert (again.returncode, again.stdout.strip()) == (0, "a" * 40)
    assert server.commits == 1
    assert run.require("hub.json")["repo"] == "me/m"


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "2 export.hub.repo: nothing can be pushed to me/m without HF_TOKEN"),
        ("hf_wrong", "2 export.hub.repo: the Hub refuses a push to me/m (401)"),
    ],
    ids=["none", "wrong"],
)
def test_a_push_without_the_right_token_is_refused(token: str | None, said: str, run: Run, server: HubServer) -> None:
    done = _push(run, server.endpoint, token)
    assert done.returncode == 1
    assert done.stderr.startswith(said), done.stderr
    assert "hf_wrong" not in done.stderr
    assert server.commits == 0
    assert run.raw("hub.json") is None


def test_a_card_that_the_hub_refuses_is_said(tmp_path: Path, server: HubServer) -> None:
    run = _exported(tmp_path, {"README.md": b"---\nlicense: no-such-licence\n---\n"})
    done = _push(run, server.endpoint, TOKEN)
    assert "2 export.hub.repo: a push to me/m is refused: " in done.stderr, done.stderr
    assert "must be one of the list" in done.stderr
    assert server.commits == 0


def test_a_hub_out_of_reach_is_said(run: Run) -> None:
    done = _push(run, "http://127.0.0.1:9", TOKEN)
    assert "1 the Hub cannot be reached for a push to me/m" in done.stderr
    assert "Traceback" not in done.stderr
