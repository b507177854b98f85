"""`baton doctor`: each thing that would be in a run's way has a line with its remedy, and nothing is left over."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton import doctor
from baton.cli.app import app
from baton.store import storage
from baton.store.clouds import ANY_BUCKET, SCHEMES
from baton.store.storage import Storage

STORE = ["store", "store: listing", "store: commit", "store: large objects", "store: clock"]
MACHINE = ["python", "libraries", "device", "processors", "memory", "/dev/shm", "temporary files"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough for several parts, and nothing is slow."""
    monkeypatch.setattr(doctor, "LARGE", 40 * 10**6)
    monkeypatch.setattr(doctor, "SLOW", 0.0)


def examine(*arguments: Any, **options: Any) -> doctor.Examined:
    return doctor.examined(doctor.examine(*arguments, **options))


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    checks = {check["name"]: check for check in found["checks"]}
    assert len(checks) == len(found["checks"])
    return checks


def of_store(uri: str) -> dict[str, dict[str, Any]]:
    """Examine a store alone."""
    return {check.name: vars(check) for check in doctor.examine_store(uri)}


def test_a_store_that_does(store: str) -> None:
    found = examine(store=store)
    checks = by_name(found)

    assert found["ok"]
    rights = ["store: rights"] if store.startswith("s3://") else []
    assert list(checks) == [*MACHINE, "store", *rights, *STORE[1:]]
    assert [checks[name]["state"] for name in STORE] == ["ok"] * 5
    how = "conditional put" if store.startswith("s3://") else "hard links"
    assert checks["store: commit"]["found"].startswith(f"{how}: ")
    assert "MB/s up" in checks["store: large objects"]["found"]
    assert Storage(store).find("") == {}


def test_folders_that_were_not_there_are_gone_again(tmp_path: Path) -> None:
    assert of_store(f"{tmp_path}/not/there")["store"]["state"] == "ok"

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "store" / "runs").mkdir(parents=True)
    of_store(f"{tmp_path}/store")

    assert os.listdir(tmp_path / "store") == ["runs"]


def test_an_endpoint_that_is_no_address_fails_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    checks = by_name(examine(store="s3://bucket"))
    assert checks["store"]["state"] == "problem"
    assert "AWS_ENDPOINT_URL" in checks["store"]["found"]
    assert "python" in checks


@pytest.mark.s3
def test_a_store_without_conditional_put(faulty_s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LEASE_SETTLE_S", 0.1)
    faulty_s3.proxy.drop_header("If-None-Match")

    found = examine(store=faulty_s3.store)
    commit = by_name(found)["store: commit"]

    assert found["ok"]
    assert commit["state"] == "note"
    assert commit["found"] == "no conditional put; a lease object with expiry takes its place"
    assert "If-None-Match" in commit["remedy"]
    assert Storage(faulty_s3.store).find("") == {}


@pytest.mark.s3
@pytest.mark.parametrize(
    "kind", ["gs", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SCHEMES if kind not in ("s3", "gs"))]
)
def test_the_other_clouds(kind: str, request: pytest.FixtureRequest) -> None:
    uri: str = request.getfixturevalue(f"{kind}_store")
    checks = of_store(uri)
    names = ["store", "store: rights", *STORE[1:]]
    assert [(name, check["state"]) for name, check in checks.items()] == [(name, "ok") for name in names]
    assert checks["store: commit"]["found"].startswith("conditional put: ")
    assert Storage(uri).find("") == {}


@pytest.mark.s3
def test_a_wrong_port(s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{_closed_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)

    found = examine(store=s3_store)
    checks = by_name(found)

    assert not found["ok"]
    assert [name for name in checks if name.startswith("store")] == ["store"]
    assert checks["store"]["state"] == "problem"
    assert checks["store"]["found"] == f"store '{s3_store}': {endpoint} cannot be reached."
    assert checks["store"]["remedy"] == "Check AWS_ENDPOINT_URL and the network."


@pytest.mark.s3
def test_no_bucket(s3_store: str) -> None:
    checks = of_store("s3://no-such-bucket/prefix")

    assert list(checks) == ["store"]
    assert checks["store"]["found"] == "store 's3://no-such-bucket/prefix': the bucket does not exist."
    assert checks["store"]["remedy"] == "Create it first."


def test_a_store_that_is_none() -> None:
    assert of_store("foo://bucket")["store"]["state"] == "problem"


@pytest.mark.s3
def test_large_objects_that_come_back_damaged(faulty_s3: Any) -> None:
    faulty_s3.proxy.corrupt(at=1000, methods="GET", path="/large", times=1)

    checks = of_store(faulty_s3.store)

    assert checks["store: large objects"]["state"] == "problem"
    assert [checks[name]["state"] for name in STORE if "large" not in name] == ["ok"] * 4
    assert Storage(faulty_s3.store).find("") == {}


@pytest.mark.s3
def test_a_store_that_falls_silent_half_way(faulty_s3: Any) -> None:
    """One thing that does not work is no reason not to look at the others."""
    faulty_s3.proxy.status(403, methods="PUT", path="/clock")

    checks = of_store(faulty_s3.store)

    assert [checks[name]["state"] for name in STORE] == ["ok", "ok", "ok", "ok", "problem"]
    assert "access denied" in checks["store: clock"]["found"]
    assert Storage(faulty_s3.store).find("") == {}


CLOCKS = {"a little": (10, "ok", "10 s behind"), "minutes": (90, "note", "90 s behind"), "hours": (7200, "problem", "")}


@pytest.mark.parametrize(("seconds", "state", "found"), CLOCKS.values(), ids=CLOCKS)
def test_clocks_that_differ(
    seconds: int, state: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Storage.write

    def late(self: Storage, path: str, data: bytes) -> None:
        write(self, path, data)
        status = os.stat(self.key(path))
        os.utime(self.key(path), (status.st_atime, status.st_mtime - seconds - 0.4))

    monkeypatch.setattr(Storage, "write", late)
    clock = of_store(str(tmp_path / "store"))["store: clock"]

    assert clock["state"] == state
    assert found in clock["found"]


def test_a_listing_that_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "list", lambda self, path: [])

    listing = of_store(str(tmp_path / "store"))["store: listing"]

    assert listing["state"] == "problem"
    assert "consistent at once" in listing["remedy"]


def test_two_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "create", lambda self, path, data: True)

    commit = of_store(str(tmp_path / "store"))["store: commit"]

    assert (commit["state"], commit["found"][-22:]) == ("problem", "are told that they won")


def test_a_slow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SLOW", 1e15)

    assert of_store(str(tmp_path / "store"))["store: large objects"]["state"] == "note"


@pytest.fixture
def recipe(tmp_path: Path, scratch_recipe: dict[str, Any]) -> Callable[..., str]:
    """Writes a recipe with its rows beside it and returns its path."""

    def write(**changes: Any) -> str:
        document = {**scratch_recipe, "store": str(tmp_path / "store"), **changes}
        (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
        return str(tmp_path / "recipe.yaml")

    return write


DECLARED = [
    "psutil>=1",
    "torch>=2",
    "transformers>=5",
    "trl>=1",
    "peft>=0",
    "obstore>=0",
    "no-such-package==1; extra == 'x'",
]


@pytest.mark.parametrize(
    ("declared", "state", "said"),
    [
        (DECLARED, "ok", "and 1 more, as declared"),
        ([*DECLARED, "psutil>=1,<2"], "note", f"psutil {version('psutil')}, not <2,>=1"),
        ([*DECLARED, "no-such-package>=1"], "problem", "not installed: no-such-package"),
    ],
    ids=["within", "outside", "missing"],
)
def test_libraries_are_held_to_what_is_declared(
    declared: list[str], state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    libraries = by_name(examine())["libraries"]
    assert libraries["state"] == state
    assert said in libraries["found"]


@pytest.mark.parametrize(("declared", "state"), [(">=3.11", "ok"), (">=3.99", "problem")])
def test_python_is_held_to_what_is_declared(declared: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": declared})
    python = by_name(examine())["python"]
    assert python["state"] == state
    assert (declared in (python["remedy"] or "")) == (state == "problem")


def test_without_a_recipe_only_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checks = by_name(examine())

    assert list(checks) == [*MACHINE, "store"]
    assert checks["store"]["remedy"] == "Add a recipe or --store."
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_names_nothing_more(recipe: Any) -> None:
    checks = by_name(examine(recipe()))

    assert list(checks) == ["recipe", *MACHINE, *STORE]
    assert checks["recipe"]["state"] == "ok"


def test_data_that_is_not_there(recipe: Any, tmp_path: Path) -> None:
    path = recipe()
    (tmp_path / "rows.jsonl").unlink()

    found = examine(path)

    assert not found["ok"]
    assert "rows.jsonl' matches no file" in by_name(found)["recipe"]["found"]


def test_more_threads_and_devices_than_there_are(recipe: Any) -> None:
    checks = by_name(examine(recipe(), ["training.threads=4096", "resources.gpus=8"]))

    assert checks["processors"]["state"] == "note"
    if not checks["device"]["found"].startswith("CPU"):
        pytest.skip("this machine has devices")
    assert checks["device"]["state"] == "note"


def test_the_node_cache(recipe: Any, tmp_path: Path) -> None:
    def look(folder: Path, size: str = "1Mi") -> dict[str, Any]:
        store = {"uri": str(tmp_path / "store"), "cache_dir": str(folder), "cache_size": size}
        return by_name(examine(recipe(store=store)))["node cache"]

    (tmp_path / "file").touch()
    absent, there, unusable, too_large = (
        look(tmp_path / "a/b"),
        look(tmp_path),
        look(tmp_path / "file"),
        look(tmp_path / "a/b", "1000Ti"),
    )

    assert [check["state"] for check in (absent, there, unusable, too_large)] == ["ok", "ok", "note", "note"]
    assert absent["found"].endswith("made when first used")
    assert "1000Ti, more than is free" in too_large["remedy"]
    assert not (tmp_path / "a").exists()


class Answers(BaseHTTPRequestHandler):
    """A tracking server that is well, or wants credentials."""

    def do_GET(self) -> None:
        self.send_response({"/health": 200, "/locked/health": 401}.get(self.path, 500))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def tracking_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_tracking_server(recipe: Any, tracking_server: str) -> None:
    closed = f"http://very-secret@127.0.0.1:{_closed_port()}"
    states = {}
    for uri in (tracking_server, f"{tracking_server}/locked", f"{tracking_server}/broken", closed):
        found = by_name(examine(recipe(tracking={"mlflow": uri})))["mlflow"]
        states[uri] = found["state"]
        assert "very-secret" not in json.dumps(found)

    assert list(states.values()) == ["ok", "note", "problem", "problem"]


def test_the_hub(recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    path = recipe(model={"base": "no-such-org/no-such-model"})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    offline = by_name(examine(path))["hub"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    online = by_name(examine(path))["hub"]

    assert (offline["state"], offline["remedy"]) == ("problem", "Unset HF_HUB_OFFLINE once.")
    assert online["found"] == "no-such-org/no-such-model can be fetched; this machine does not have it yet"


def test_the_command(tmp_path: Path) -> None:
    well = CliRunner().invoke(app, ["doctor", "--store", str(tmp_path), "--output", "json"])
    ill = CliRunner().invoke(app, ["doctor", "--store", "foo://x"])

    assert (well.exit_code, json.loads(well.stdout)["ok"]) == (0, True)
    assert ill.exit_code == 1
    assert "problem" in ill.stdout
    assert f"Use a folder, or a bucket at {ANY_BUCKET}." in " ".join(ill.stdout.split())


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
