"""What tests of several folders share: stores of both kinds, and a real S3 server."""

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from baton import events
from tests.faults.proxy import FaultyProxy

events.setup_environment()  # else a command that runs inside of pytest does, when the warm server has begun without it
settings.register_profile("baton", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("baton")

pytest_plugins = ("tests.support.pipelines",)
LONG_FIRST = ("exactness", "end_to_end", "cli", "kubeflow", "local", "compiler")
"""Folders of the longest tests: begun first, no worker is left with one of them when the others have ended."""
SLOW_S = 1800  # three times the longest one alone: three at a time share a machine's cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest before the others, and gives slow tests more time than quick ones."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    items.sort(
        key=lambda item: next((at for at, name in enumerate(LONG_FIRST) if name in item.path.parts), len(LONG_FIRST))
    )


@pytest.fixture(scope="module", autouse=True)
def _imported_is_not_garbage() -> None:
    """Spares each collection a look at all that torch has imported: half a second, and one for every training."""
    gc.freeze()


class S3Server:
    """A moto server in a process of its own.

    Attributes:
        endpoint: Its address.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                self.endpoint = found[1]
                break
        else:
            raise RuntimeError("the S3 server ended before it listened")
        # An unread pipe that is full would stop the server.
        self._drain = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def require_rights(self, required: bool) -> None:
        """Make the server check access keys, of which it knows none, or take any."""
        count = b"0" if required else b"inf"
        request = urllib.request.Request(
            f"{self.endpoint}/moto-api/reset-auth", data=count, method="POST", headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def stop(self) -> None:
        """End both processes."""
        self.process.terminate()
        self.process.wait(10)
        self._drain.wait(10)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The session's S3 server."""
    server = S3Server()
    yield server
    server.stop()


def set_aws_env(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    """Set the `AWS_*` environment to exactly what is given, and look nowhere else for it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    elsewhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    for name, value in {**elsewhere, "AWS_EC2_METADATA_DISABLED": "true", **values}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def aws_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets the `AWS_*` environment to exactly what is given; clients made before or after forget theirs."""
    import s3fs

    def set_exactly(**values: str) -> None:
        set_aws_env(monkeypatch, values)
        s3fs.S3FileSystem.clear_instance_cache()

    yield set_exactly
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3_credentials(s3_server: S3Server) -> dict[str, str]:
    """The environment that reaches the session's S3 server."""
    return {
        "AWS_ENDPOINT_URL": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture
def s3_store(s3_credentials: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of a fresh, empty bucket, with the environment that reaches it."""
    import s3fs

    set_aws_env(monkeypatch, s3_credentials)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}"


def _started(kind: str) -> Iterator[Any]:
    """Starts an emulator, or skips where it is not installed and cannot be; in CI it must be where npm is."""
    emulators = importlib.import_module("tests.support.emulators")
    try:
        server = getattr(emulators, kind)()
    except emulators.NotInstalledError as error:
        if os.environ.get("CI") and not isinstance(error, emulators.NoInstallerError):
            raise
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azurite() -> Iterator[Any]:
    """The session's Azure server."""
    yield from _started("Azurite")


@pytest.fixture(scope="session")
def fake_google() -> Iterator[Any]:
    """The session's Google server."""
    yield from _started("FakeGoogle")


@pytest.fixture
def az_store(azurite: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of a fresh, empty container, with the environment that reaches it."""
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    return f"az://{azurite.container()}"


@pytest.fixture
def gs_store(fake_google: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of a fresh, empty bucket, with the environment that reaches it."""
    for name, value in fake_google.environment.items():
        monkeypatch.setenv(name, value)
    return f"gs://{fake_google.bucket()}"


@pytest.fixture
def faulty_proxy() -> Iterator[Callable[[str], FaultyProxy]]:
    """Starts a `FaultyProxy` in front of the endpoint it is given; all of them end with the test."""
    with contextlib.ExitStack() as proxies:

        def start(upstream_endpoint: str) -> FaultyProxy:
            proxy = FaultyProxy(upstream_endpoint)
            proxies.callback(proxy.stop)
            return proxy

        yield start


@dataclass
class FaultyS3:
    """A bucket behind a proxy that can fail.

    Attributes:
        proxy: Still without rules.
        store: URI of the bucket, which is fresh and empty.
    """

    proxy: FaultyProxy
    store: str


@pytest.fixture
def faulty_s3(
    s3_server: S3Server, s3_store: str, faulty_proxy: Callable[[str], FaultyProxy], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyS3]:
    """A fresh bucket and the proxy in front of it, with the environment that reaches it through the proxy."""
    import s3fs

    proxy = faulty_proxy(s3_server.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    s3fs.S3FileSystem.clear_instance_cache()
    yield FaultyS3(proxy, s3_store)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URI of an empty store: a folder, then a bucket."""
    if request.param == "folder":
        return str(tmp_path / "store")
    bucket: str = request.getfixturevalue("s3_store")
    return bucket


@pytest.fixture
def scratch_recipe() -> dict[str, Any]:
    """A recipe for a small model from scratch, as plain values to change before they are checked."""
    return {
        "name": "tiny",
        "seed": 7,
        "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": "rows.jsonl"},
        "tracking": {"mlflow": None},
    }


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny Llama with random weights and a tokenizer."""
    from tests.support import tiny

    return tiny.make_base(Path(tmp_path_factory.mktemp("tiny"), "base"))


@pytest.fixture(scope="session")
def chat_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny Llama with a chat template and a tokenizer that Baton did not train."""
    from tests.support import tiny

    return tiny.make_chat_base(Path(tmp_path_factory.mktemp("tiny"), "chat"))
