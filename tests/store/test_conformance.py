"""What every kind of store promises, on each kind that can be had here."""

from __future__ import annotations

import hashlib
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from baton.errors import DamagedError, StoreError
from baton.store import bundle, clouds
from baton.store.manifest import usable_manifest
from baton.store.protocol import ObjectStore
from baton.store.sources import files
from baton.store.storage import Storage, open_store

KINDS = ["folder", *(pytest.param(kind, marks=pytest.mark.s3) for kind in clouds.SCHEMES)]


@pytest.fixture(params=KINDS)
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty store, below a prefix."""
    kind: str = request.param
    root: str = str(tmp_path / "store") if kind == "folder" else request.getfixturevalue(f"{kind}_store")
    return f"{root}/a prefix"


@pytest.fixture
def client(uri: str) -> ObjectStore:
    """The client that moves the bytes."""
    return open_store(uri)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a few megabytes an object of several parts."""
    monkeypatch.setattr(clouds, "PART", 5 * 1024 * 1024)
    monkeypatch.setattr(clouds, "RANGE", 3 * 1024 * 1024)


def test_an_object_comes_back(client: ObjectStore):
    client.write("a/b", b"first")
    client.write("a/b", b"\x00second")
    assert client.read("a/b") == b"\x00second"
    assert client.size("a/b") == 7
    assert open_store(client.uri).read("a/b") == b"\x00second"


def test_an_empty_object_is_one(client: ObjectStore, tmp_path: Path):
    client.write("empty", b"")
    assert (client.size("empty"), client.read("empty")) == (0, b"")
    assert client.download("empty", str(tmp_path / "empty"), 0) == hashlib.sha256(b"").hexdigest()


def test_what_is_missing_is_missing(client: ObjectStore, tmp_path: Path):
    client.write("a/b", b"1")
    for path in ("a/c", "a", "z"):
        assert client.size(path) is None
    for read in (client.read, lambda path: list(client.blocks(path))):
        with pytest.raises(FileNotFoundError) as missing:
            read("a/c")
        assert isinstance(client.explain(missing.value), FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        client.download("a/c", str(tmp_path / "c"), 5)
    assert client.list("z") == []
    assert client.find("z") == {}
    client.remove("a/c")


def test_of_two_creators_one_wins(client: ObjectStore):
    assert client.create("a/one", b"first")
    assert not client.create("a/one", b"second")
    assert client.read("a/one") == b"first"


@pytest.mark.parametrize("repeat", range(2))
def test_of_sixteen_creators_one_wins(repeat: int, uri: str):
    barrier, won, failures = threading.Barrier(16), [], []
    stores = [Storage(uri) for _ in range(16)]

    def create(number: int) -> None:
        barrier.wait()
        try:
            if stores[number].create("contested", b"%d" % number * 100):
                won.append(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert len(won) == 1
    assert stores[0].read("contested") == b"%d" % won[0] * 100
    assert stores[0].list("") == ["contested"]


def test_certain_or_tried_the_condition_holds(uri: str):
    assert Storage(uri).has_conditional_put


def test_listings(client: ObjectStore):
    for path in ("d/b", "d/a.json", "d/c/x", "d/c/y/z", "dd/z", "top"):
        client.write(path, path.encode())
    began = datetime.now(UTC)

    assert sorted(client.list("d")) == ["a.json", "b", "c"]
    assert sorted(client.list("")) == ["d", "dd", "top"]
    entries = client.find("d")
    assert {name: entry.size for name, entry in entries.items()} == {"a.json": 8, "b": 3, "c/x": 5, "c/y/z": 7}
    assert all(abs(entry.modified - began) < timedelta(minutes=1) for entry in entries.values())
    assert set(client.find("")) == {"d/a.json", "d/b", "d/c/x", "d/c/y/z", "dd/z", "top"}


def test_names_may_hold_more_than_letters(client: ObjectStore, tmp_path: Path):
    name = "a b/é+%25&=~ü.json"
    client.write(name, b"1")
    assert client.read(name) == b"1"
    assert not client.create(name, b"2")
    assert client.list("a b") == ["é+%25&=~ü.json"]
    assert set(client.find("")) == {name}
    assert client.download(name, str(tmp_path / "x"), 1) == hashlib.sha256(b"1").hexdigest()
    client.remove(name)
    assert client.find("") == {}


def test_what_is_removed_is_not_listed(client: ObjectStore):
    client.write("d/a", b"1")
    client.write("d/b", b"2")
    client.remove("d/a")
    assert client.list("d") == ["b"]
    client.remove("d/b")
    client.tidy("d")
    assert client.list("") == []


@pytest.mark.parametrize("size", [1, 5 * 1024 * 1024, 12_000_001], ids=["byte", "part", "parts"])
def test_a_file_goes_up_in_parts_and_comes_back_in_ranges(size: int, uri: str, tmp_path: Path):
    content = os.urandom(size)
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "up").write_bytes(content)
    storage = Storage(uri)

    assert storage.upload(str(tmp_path / "up"), "deep/er/file") == digest
    assert storage.size("deep/er/file") == size
    assert storage.download("deep/er/file", str(tmp_path / "down")) == digest
    assert (tmp_path / "down").read_bytes() == content
    assert storage.sha256("deep/er/file") == (size, digest)


def test_an_upload_that_is_told_to_end_leaves_nothing(client: ObjectStore, tmp_path: Path):
    (tmp_path / "large").write_bytes(bytes(12_000_000))

    class ToldError(Exception):
        pass

    def seen(block: bytes) -> None:
        raise ToldError

    with pytest.raises(Exception):  # noqa: B017, PT011 - a client may put another error in its place
        client.upload(str(tmp_path / "large"), "large", seen)
    if not client.is_local:
        assert client.size("large") is None


def copies(client: ObjectStore) -> bool:
    """Tells whether this kind of store copies inside."""
    return not isinstance(client, clouds.CloudStore) or client.cloud.largest_copy > 0


@pytest.mark.parametrize("name", ["a", "a b/é+%25&=~ü.json"])
def test_a_copy_is_made_inside_the_store(name: str, uri: str, tmp_path: Path):
    content = os.urandom(12_000_001)
    (tmp_path / "up").write_bytes(content)
    storage = Storage(uri)
    digest = storage.upload(str(tmp_path / "up"), f"from/{name}")
    storage.write(f"to/{name}", b"what was there")

    sent = storage.sent
    assert storage.copy(f"from/{name}", f"to/{name}", len(content)) is copies(storage.client)
    if copies(storage.client):
        assert (storage.sha256(f"to/{name}"), storage.sent) == ((len(content), digest), sent)
        storage.remove(f"from/{name}")
        assert storage.sha256(f"to/{name}") == (len(content), digest)
        with pytest.raises(FileNotFoundError):
            storage.copy(f"from/{name}", "to/another", len(content))
        assert set(storage.find("")) == {f"to/{name}"}


def test_a_copy_of_another_size_is_none(uri: str):
    storage = Storage(uri)
    storage.write("from", b"123")
    assert not storage.copy("from", "to", 4)


def test_what_is_written_over_a_copy_leaves_its_source_as_it_was(uri: str, tmp_path: Path):
    storage = Storage(uri)
    storage.write("from", b"first")
    (tmp_path / "up").write_bytes(b"other")
    for change in (lambda: storage.write("to", b"other"), lambda: storage.upload(str(tmp_path / "up"), "to")):
        storage.copy("from", "to", 5)
        change()
        assert (storage.read("from"), storage.read("to")) == (b"first", b"other")


def test_a_bundle_is_committed_fetched_and_found_damaged(uri: str, tmp_path: Path):
    storage, local = Storage(uri), tmp_path / "local"
    (local / "folder").mkdir(parents=True)
    (local / "weights").write_bytes(os.urandom(6_000_000))
    (local / "folder" / "note").write_text("é")

    manifest, ours = bundle.publish(storage, "p", str(local), kind="k", meta={"step": 1})
    assert ours
    assert bundle.publish(storage, "p", str(local), kind="k", meta={}) == (manifest, False)
    folder = Path(bundle.fetch(storage, "p", manifest, str(tmp_path / "back")))
    assert (folder / "weights").read_bytes() == (local / "weights").read_bytes()
    assert (folder / "folder" / "note").read_text() == "é"
    assert bundle.verify(storage, "p", manifest) == []

    storage.write(manifest.path("p", "folder/note"), b"ee")
    with pytest.raises(DamagedError, match="folder/note: SHA-256 is"):
        bundle.fetch(storage, "p", manifest, str(tmp_path / "again"))
    assert usable_manifest(storage, "p") is None


def test_rows_are_read_by_fsspec(uri: str):
    storage = Storage(uri)
    for name in ("rows/a.jsonl", "rows/b.jsonl", "rows/notes.txt", "other.jsonl"):
        storage.write(name, b'{"text": "1"}\n')

    for source, expected in ((f"{uri}/rows", 2), (f"{uri}/rows/*.jsonl", 2), (f"{uri}/other.jsonl", 1)):
        rows = files([source])
        assert len(rows) == expected
        with rows[0].open() as file:
            assert file.read() == b'{"text": "1"}\n'


@pytest.mark.parametrize("uri", KINDS[1:], indirect=True)
def test_a_container_that_is_not_there(uri: str):
    missing = f"{uri.partition('://')[0]}://no-such-container/x"
    with pytest.raises(StoreError, match=r"the (bucket|container) does not exist\. Create it first\."):
        Storage(missing, patience=0).check()


@pytest.mark.parametrize("scheme", clouds.SCHEMES)
def test_an_address_with_credentials_in_it_is_refused_and_not_repeated(scheme: str):
    for address in (f"{scheme}://key:secret@bucket/x", f"{scheme}://bucket/x?sig=secret"):
        with pytest.raises(StoreError, match="credentials come from the environment") as caught:
            Storage(address)
        assert "secret" not in str(caught.value)
