"""The object store: a folder and a bucket behave alike, and what goes wrong is one message."""

import errno
import hashlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, StoreError, UnavailableError
from baton.runtime import Runtime
from baton.store import storage as module
from baton.store.folder import Folder
from baton.store.protocol import BLOCK, DeniedError
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


FIRST: dict[str, tuple[bytes, int, bytes]] = {
    "an empty file": (b"", 2, b""),
    "fewer": (b"a", 2, b"a"),
    "as many": (b"ab", 2, b"ab"),
    "more": (b"abc", 2, b"ab"),
    "longer than a block": (b"a" * BLOCK + b"bc", BLOCK + 1, b"a" * BLOCK + b"b"),
}


@pytest.mark.parametrize(("content", "count", "expected"), FIRST.values(), ids=FIRST)
def test_first_bytes(content: bytes, count: int, expected: bytes, store: str):
    storage = Storage(store)
    storage.write("rows.jsonl", content)
    assert storage.first_bytes("rows.jsonl", count) == expected


class Failing(Folder):
    """A folder that does not answer for so many calls, and tells which were made."""

    def __init__(self, uri: str, failures: int = 0, error: Exception | None = None) -> None:
        super().__init__(uri)
        self.failures, self.error = failures, error or UnavailableError("no answer")
        self.calls: list[str] = []

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) <= self.failures:
            raise self.error

    def read(self, path: str) -> bytes:
        self._called("read")
        return super().read(path)

    def remove(self, path: str) -> None:
        self._called("remove")
        super().remove(path)

    def copy(self, source: str, path: str, size: int) -> bool:
        self._called("copy")
        super().write(path, super().read(source))
        return True

    def blocks(self, path: str) -> Iterator[bytes]:
        for block in super().blocks(path):
            self._called("block")
            yield block


class Clock(Runtime):
    """A machine whose time passes only where it sleeps."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 3))

    def uniform(self, low: float, high: float) -> float:
        assert (low, high) == (0.75, 1.25)
        return 1.0


PATIENCE: dict[str, tuple[float | None, dict[str, str], list[float]]] = {
    "none": (0.0, {}, []),
    "as long as asked": (50.0, {}, [0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]),
    "as the environment has it": (None, {"BATON_STORE_PATIENCE": "2"}, [0.4, 0.8]),
    "ten seconds": (None, {}, [0.4, 0.8, 1.6, 3.2]),
}


@pytest.mark.parametrize(("patience", "environment", "pauses"), PATIENCE.values(), ids=PATIENCE)
def test_pauses_grow_until_patience_ends(
    patience: float | None,
    environment: dict[str, str],
    pauses: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.delenv("BATON_STORE_PATIENCE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    clock, client = Clock(), Failing(str(tmp_path), failures=99)
    with pytest.raises(UnavailableError, match="no answer"):
        Storage(str(tmp_path), patience=patience, client=client, runtime=clock).read("a")
    assert clock.slept == pauses
    assert len(client.calls) == len(pauses) + 1
    assert [record.getMessage() for record in caplog.records] == [
        f"no answer Next try in {pause:.1f} s." for pause in pauses
    ]


REMOVALS: dict[str, tuple[int, Exception | None, bool, bool | type[Exception], int]] = {
    "at once": (0, None, False, True, 1),
    "at the second try": (1, None, True, True, 2),
    "used again before the second try": (1, None, False, False, 1),
    "denied": (1, DeniedError("no right"), True, False, 1),
    "another error": (1, StoreError("broken"), True, StoreError, 1),
}
"""Removal → how often it fails and by what, whether the name is still as it was, the result, and the calls."""


@pytest.mark.parametrize(("failures", "error", "is_still_so", "result", "calls"), REMOVALS.values(), ids=REMOVALS)
def test_a_removal_is_tried_again_only_of_what_is_as_it_was(
    failures: int,
    error: Exception | None,
    is_still_so: bool,
    result: bool | type[Exception],
    calls: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    client = Failing(str(tmp_path), failures, error)
    storage = Storage(str(tmp_path), client=client, runtime=Clock())
    storage.write("a", b"1")
    if isinstance(result, bool):
        assert storage.remove("a", lambda: is_still_so) is result
    else:
        with pytest.raises(result):
            storage.remove("a", lambda: is_still_so)
    assert len(client.calls) == calls
    assert storage.exists("a") == (result is not True)
    is_denied = isinstance(error, DeniedError)
    assert [record.message for record in caplog.records if "stay" in record.message] == [
        "Unneeded objects stay in the store. no right"
    ] * is_denied
    client.failures = 99
    if is_denied:
        assert storage.remove("a") is False
        assert "again" not in caplog.text
        assert caplog.text.count("Unneeded objects") == 1, "said once"
    assert storage.cannot_remove is None, "a folder's rights are seen as it is used"


@pytest.mark.s3
def test_a_cloud_that_denies_removal_is_asked_once(faulty_s3: Any, caplog: pytest.LogCaptureFixture):
    storage = Storage(faulty_s3.store, patience=0)
    storage.write("a", b"1")
    assert storage.cannot_remove is None
    denied = faulty_s3.proxy.status(403, "AccessDenied", methods="DELETE")
    denying = Storage(faulty_s3.store, patience=0)
    for _ in range(2):
        assert isinstance(denying.cannot_remove, DeniedError)
    assert denied.hits == 1
    denying.check()
    assert not denying.remove("a")
    assert storage.read("a") == b"1"
    assert caplog.text.count("Unneeded objects stay in the store") == 1


CONDITIONS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "honoured": (lambda proxy: None, True),
    "ignored": (lambda proxy: proxy.drop_header("If-None-Match"), False),
}


@pytest.mark.s3
@pytest.mark.parametrize(("server", "is_honoured"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_that_a_server_honours_needs_no_lease(
    server: Callable[[Any], Any], is_honoured: bool, faulty_s3: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "LEASE_SETTLE_S", 0.05)
    server(faulty_s3.proxy)
    storage = Storage(faulty_s3.store)
    assert storage.has_conditional_put is is_honoured
    assert storage.find("") == {}, "the probe is gone"
    asked = len(faulty_s3.proxy.requests())
    assert storage.has_conditional_put is is_honoured
    assert len(faulty_s3.proxy.requests()) == asked
    assert storage.create("one", b"first")
    assert not storage.create("one", b"second")
    leases = [request for request in faulty_s3.proxy.requests() if "one.lease" in request]
    assert bool(leases) != is_honoured
    assert list(storage.find("")) == ["one"]


@pytest.mark.parametrize(("size", "is_copied"), [(5, True), (4, False)])
def test_a_copy_counts_where_it_has_its_size(size: int, is_copied: bool, tmp_path: Path):
    storage = Storage(str(tmp_path), client=Failing(str(tmp_path)))
    storage.write("a", b"12345")
    assert storage.copy("a", "b", size) is is_copied


def test_first_lines_and_bytes_read_no_more_blocks_than_hold_them(tmp_path: Path):
    client = Failing(str(tmp_path))
    storage = Storage(str(tmp_path), client=client)
    storage.write("a", b"x\n" + b"y" * 3 * BLOCK)
    assert storage.first_lines("a", 1) == [b"x"]
    assert storage.first_bytes("a", BLOCK) == (b"x\n" + b"y" * BLOCK)[:BLOCK]
    assert client.calls == ["block", "block"]


def test_a_file_of_unknown_size_is_fetched_and_counted(store: str, tmp_path: Path):
    storage = Storage(store)
    storage.write("a", b"123")
    assert storage.download("a", str(tmp_path / "new/a")) == hashlib.sha256(b"123").hexdigest()
    assert storage.received == 3
    with pytest.raises(FileNotFoundError, match=r"/b$"):
        storage.download("b", str(tmp_path / "b"))
    assert storage.received == 3


def test_an_upload_ends_where_its_check_does(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"1" * 3 * BLOCK)
    storage, checks = Storage(str(tmp_path / "store")), itertools.count()

    def check() -> None:
        if next(checks) >= 2:
            raise BatonError("enough")

    with pytest.raises(BatonError, match="enough"):
        storage.upload(str(tmp_path / "file"), "a", check)
    assert storage.sent == 0


class Wrapping(Folder):
    """A client that raises an error of its own in the place of any other."""

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        """Uploads."""
        try:
            super().upload(local_path, path, seen)
        except BatonError:
            raise OSError(errno.EIO, "the client's own") from None

    def download(self, path: str, local_path: str, size: int) -> str:
        """Downloads nothing."""
        raise self.error

    error = OSError(errno.ENOSPC, "No space left on device")


def test_the_error_of_a_check_is_raised_whatever_the_client_makes_of_it(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"1")
    uri = str(tmp_path / "store")
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise BatonError("a newer one takes its place.")

    with pytest.raises(BatonError, match="a newer one takes its place"):
        Storage(uri, client=Wrapping(uri)).upload(str(tmp_path / "file"), "a", check)


def test_a_download_without_room_names_place_and_size(tmp_path: Path):
    uri = str(tmp_path / "store")
    Storage(uri).write("a", b"12345")
    client = Wrapping(uri)
    storage = Storage(uri, client=client, patience=0)
    with pytest.raises(BatonError, match=rf"{tmp_path}/back has no room for {uri}/a, 5 bytes") as caught:
        storage.download("a", str(tmp_path / "back" / "a"))
    assert "resources.shm" in str(caught.value)
    client.error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(Exception, match="Input/output error"):
        storage.download("a", str(tmp_path / "back" / "a"))


ADDRESSES = {
    "": "STORE",
    "a/b": "STORE/a/b",
    "a/": "STORE/a",
}


@pytest.mark.parametrize(("path", "address"), ADDRESSES.items())
def test_an_objects_address_and_file(path: str, address: str, tmp_path: Path):
    storage = Storage(f"file://{tmp_path}/")
    assert storage.uri(path) == storage.key(path) == address.replace("STORE", str(tmp_path))
    assert storage.is_local


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
