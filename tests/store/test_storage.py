"""The object store: a folder and a bucket behave alike, and what goes wrong is one message."""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import StoreError
from baton.store.protocol import BLOCK
from baton.store.sources import file_system
from baton.store.storage import Storage


def test_write_and_read(store: str):
    storage = Storage(store)
    storage.write("a/b.bin", b"first")
    storage.write("a/b.bin", b"\x00second")

    assert storage.read("a/b.bin") == b"\x00second"
    assert storage.uri("a/b.bin") == f"{store}/a/b.bin"


def test_a_prefix_is_a_store_of_its_own(store: str):
    Storage(f"{store}/team/").write("a", b"1")

    assert Storage(store).read("team/a") == b"1"
    assert Storage(f"{store}/team").list("") == ["a"]


def test_read_of_nothing(store: str):
    Storage(store).write("a/b", b"1")

    for path in ("a/c", "z"):
        with pytest.raises(FileNotFoundError):
            Storage(store).read(path)


LINES = {
    "an empty file": (b"", 2, [b""]),
    "fewer": (b"a\nb\n", 5, [b"a", b"b", b""]),
    "as many": (b"a\nb\n", 2, [b"a", b"b"]),
    "more": (b"a\nb\nc", 2, [b"a", b"b"]),
    "without an end": (b"a\nb", 2, [b"a", b"b"]),
    "longer than a block": (b"a" * 9_000_000 + b"\nb\nc", 2, [b"a" * 9_000_000, b"b"]),
}


@pytest.mark.parametrize(("content", "count", "expected"), LINES.values(), ids=LINES)
def test_first_lines(content: bytes, count: int, expected: list[bytes], store: str):
    storage = Storage(store)
    storage.write("rows.jsonl", content)
    assert storage.first_lines("rows.jsonl", count) == expected
    with pytest.raises(FileNotFoundError):
        storage.first_lines("nothing.jsonl", count)


def test_exists_is_for_objects(store: str):
    storage = Storage(store)
    storage.write("a/b", b"")

    assert [storage.exists(path) for path in ("a/b", "a", "a/c", "z/b")] == [True, False, False, False]


def test_list_is_sorted_and_one_level_deep(store: str):
    storage = Storage(store)
    for path in ("d/b", "d/a", "d/c/x", "d/c/y", "dd/z", ".baton-x"):
        storage.write(path, b"1")

    assert storage.list("d") == ["a", "b", "c"]
    assert storage.list("") == ["d", "dd"]
    assert storage.list("nothing") == []


def test_list_sees_what_another_process_wrote(store: str):
    storage = Storage(store)
    storage.write("d/a", b"1")
    storage.list("d")
    Storage(store).write("d/b", b"2")

    assert storage.list("d") == ["a", "b"]


@pytest.mark.parametrize("size", [0, 1, BLOCK, 2 * BLOCK + 7], ids=["empty", "byte", "block", "blocks"])
def test_upload_and_download(size: int, store: str, tmp_path: Path):
    storage, content = Storage(store), (b"0123456789abcdef" * (size // 16 + 1))[:size]
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "up").write_bytes(content)

    storage.upload(str(tmp_path / "up"), "deep/er/file")

    assert storage.sha256("deep/er/file") == (size, digest)
    assert storage.download("deep/er/file", str(tmp_path / "new" / "down")) == digest
    assert (tmp_path / "new" / "down").read_bytes() == content


def test_what_several_threads_send_and_receive_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = Storage(str(tmp_path / "store"))
    paths = [f"{number}.bin" for number in range(16)]
    for path in paths:
        (tmp_path / path).write_bytes(b"x" * 1000)
    real = os.path.getsize
    monkeypatch.setattr(os.path, "getsize", lambda path: (time.sleep(0.005), real(path))[1])  # another thread's turn

    storage.runtime.each(lambda path: storage.upload(str(tmp_path / path), path), paths)
    storage.runtime.each(lambda path: storage.download(path, str(tmp_path / f"again-{path}")), paths)

    assert (storage.sent, storage.received) == (16_000, 16_000)


def test_create_never_replaces(store: str):
    storage = Storage(store)

    assert storage.create("a/one", b"first")
    assert not storage.create("a/one", b"second")
    assert storage.read("a/one") == b"first"


@pytest.mark.parametrize("repeat", range(3))
def test_sixteen_create_and_one_wins(repeat: int, store: str):
    storage, barrier, won = Storage(store), threading.Barrier(16), []

    def create(number: int) -> None:
        barrier.wait()
        if storage.create("a/contested", b"%d" % number * 1000):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(won) == 1
    assert storage.read("a/contested") == b"%d" % won[0] * 1000
    assert storage.list("a") == ["contested"]


def test_a_folder_that_others_tidy_away_is_made_again(tmp_path: Path):
    storage, done = Storage(str(tmp_path / "store")), threading.Event()

    def tidy() -> None:
        while not done.is_set():
            storage.tidy("a/b")
            storage.tidy("a")
            time.sleep(0)

    tidying = threading.Thread(target=tidy)
    tidying.start()
    try:
        for number in range(500):
            storage.write("a/b/written", b"%d" % number)
            assert storage.read("a/b/written") == b"%d" % number
            storage.remove("a/b/written")
            assert storage.create("a/b/created", b"")
            storage.remove("a/b/created")
    finally:
        done.set()
        tidying.join()


def test_check_leaves_nothing_behind(store: str):
    storage = Storage(store)
    storage.check()

    assert storage.list("") == []
    assert list(file_system(storage).find(storage.root)) == []


def closed_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


USES: dict[str, Callable[[Storage], Any]] = {
    "check": lambda storage: storage.check(),
    "create": lambda storage: storage.create("a", b"1"),
    "write": lambda storage: storage.write("a", b"1"),
    "read": lambda storage: storage.read("a"),
    "list": lambda storage: storage.list("a"),
    "exists": lambda storage: storage.exists("a"),
    "upload": lambda storage: storage.upload(__file__, "a"),
    "download": lambda storage: storage.download("a", os.devnull),
    "sha256": lambda storage: storage.sha256("a"),
}
WRITES = {name: USES[name] for name in ("check", "create", "write", "upload")}


def refused(use: Callable[[Storage], Any], uri: str) -> str:
    """Use a store where it must fail, and return its one line."""
    with pytest.raises(StoreError) as caught:
        use(Storage(uri))
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.s3
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_credentials(use: Any, s3_store: str, s3_server: Any, aws_env: Any):
    aws_env(AWS_ENDPOINT_URL=s3_server.endpoint)

    message = refused(use, s3_store)

    assert message.startswith(f"store '{s3_store}': no credentials found. Set AWS_ACCESS_KEY_ID and")


@pytest.mark.s3
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_access_denied(use: Any, s3_store: str, s3_server: Any):
    s3_server.require_rights(True)
    try:
        message = refused(use, s3_store)
    finally:
        s3_server.require_rights(False)

    assert message.startswith(f"store '{s3_store}': access denied (InvalidAccessKeyId: ")
    assert message.endswith("Check AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN of a temporary key, and AWS_ENDPOINT_URL.")


@pytest.mark.s3
@pytest.mark.parametrize("use", [*WRITES.values(), USES["read"]], ids=[*WRITES, "read"])
def test_no_bucket(use: Any, s3_store: str):
    message = refused(use, "s3://no-such-bucket/prefix")

    assert message == "store 's3://no-such-bucket/prefix': the bucket does not exist. Create it first."


@pytest.mark.s3
def test_refused_connection(aws_env: Any, s3_credentials: dict[str, str]):
    endpoint = f"http://127.0.0.1:{closed_port()}"
    aws_env(**{**s3_credentials, "AWS_ENDPOINT_URL": endpoint})

    message = refused(USES["check"], "s3://bucket")

    assert message == f"store 's3://bucket': {endpoint} cannot be reached. Check AWS_ENDPOINT_URL and the network."


@pytest.mark.s3
def test_an_endpoint_that_is_no_address(aws_env: Any, s3_credentials: dict[str, str]):
    aws_env(**{**s3_credentials, "AWS_ENDPOINT_URL": "localhost:9000"})

    assert "AWS_ENDPOINT_URL is not an address (Invalid endpoint: localhost:9000)" in refused(
        USES["check"], "s3://bucket"
    )


@pytest.mark.parametrize("uri", ["foo://bucket", "S3://bucket", "gcs://bucket", "github://x", "s3://"])
def test_a_protocol_that_cannot_be_used(uri: str):
    message = refused(USES["check"], uri)

    assert message.startswith(f"store '{uri}' ")
    assert "s3://bucket" in message if uri == "s3://" else "s3://, gs:// or az://" in message


@pytest.mark.parametrize("use", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("below", ["", "/below"], ids=["the file", "below it"])
def test_a_folder_that_is_a_file(below: str, use: Any, tmp_path: Path):
    (tmp_path / "file").write_text("x")

    assert "NotADirectoryError" in refused(use, f"{tmp_path}/file{below}")
    assert (tmp_path / "file").read_text() == "x"
