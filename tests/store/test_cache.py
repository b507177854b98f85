"""The node cache: saves fetching what is here, and is never trusted, nor in the way."""

import hashlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import DamagedError
from baton.recipe.run import Store
from baton.store import bundle
from baton.store.cache import NodeCache
from baton.store.storage import Storage

CONTENT = b"0123456789" * 100


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., str]:
    """Writes a file outside the cache and returns its path."""

    def write(content: bytes = CONTENT, name: str = "made") -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    """A cache with room for three files of `CONTENT`."""
    return NodeCache(str(tmp_path / "cache"), 3 * len(CONTENT))


def taken(cache: NodeCache, content: bytes, tmp_path: Path) -> bool:
    """Ask for a file by its content, in a folder that is not there yet."""
    wanted = tmp_path / "wanted" / digest(content)[:8] / "file"
    found = cache.take(digest(content), str(wanted))
    assert not found or wanted.read_bytes() == content
    shutil.rmtree(tmp_path / "wanted", ignore_errors=True)
    return found


def test_what_is_kept_is_a_link_and_so_is_what_is_taken(cache: NodeCache, put: Any, tmp_path: Path):
    made, wanted = put(), tmp_path / "wanted" / "file"
    cache.keep(digest(CONTENT), made)

    assert cache.take(digest(CONTENT), str(wanted))
    assert wanted.read_bytes() == CONTENT
    assert os.stat(made).st_ino == os.stat(wanted).st_ino
    assert os.listdir(cache.folder) == [digest(CONTENT)]


def test_on_another_file_system_it_is_a_copy(
    cache: NodeCache, put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(source: str, target: str) -> None:
        if not os.path.exists(source):
            raise FileNotFoundError(source)
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    made, wanted = put(), tmp_path / "wanted" / "file"
    cache.keep(digest(CONTENT), made)

    assert not cache.take("0" * 64, str(wanted))
    assert cache.take(digest(CONTENT), str(wanted))
    assert wanted.read_bytes() == CONTENT
    assert os.stat(made).st_ino != os.stat(wanted).st_ino
    assert os.listdir(cache.folder) == [digest(CONTENT)]


def test_what_is_not_here_leaves_nothing(cache: NodeCache, tmp_path: Path):
    wanted = tmp_path / "wanted" / "file"

    assert not cache.take(digest(CONTENT), str(wanted))
    assert not wanted.exists()


def test_what_is_there_already_is_replaced(cache: NodeCache, put: Any):
    cache.keep(digest(CONTENT), put())
    old = put(b"old", "old")

    assert cache.take(digest(CONTENT), old)
    assert Path(old).read_bytes() == CONTENT


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "one bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "truncated": lambda content: content[:-1],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed_and_removed(damage: Any, cache: NodeCache, put: Any, tmp_path: Path):
    cache.keep(digest(CONTENT), put())
    kept = Path(cache.folder) / digest(CONTENT)
    kept.write_bytes(damage(CONTENT))

    assert not taken(cache, CONTENT, tmp_path)
    assert os.listdir(cache.folder) == []


@pytest.mark.s3
def test_a_damaged_file_is_fetched_again_and_kept(cache: NodeCache, put: Any, s3_store: str, tmp_path: Path):
    storage, content = Storage(s3_store), {"a.bin": CONTENT, "b.bin": CONTENT[:500]}
    (tmp_path / "bundle").mkdir()
    for name, data in content.items():
        put(data, f"bundle/{name}")
    manifest, _ = bundle.publish(storage, "p", str(tmp_path / "bundle"), kind="test", meta={})
    bundle.fetch(storage, "p", manifest, str(tmp_path / "first"), cache)
    assert storage.received == 1500
    with open(Path(cache.folder) / digest(CONTENT), "r+b") as file:
        file.write(b"1")

    folder = bundle.fetch(storage, "p", manifest, str(tmp_path / "second"), cache)

    assert storage.received == 2500
    assert {name: (Path(folder) / name).read_bytes() for name in content} == content
    bundle.fetch(storage, "p", manifest, str(tmp_path / "third"), cache)
    assert storage.received == 2500


@pytest.mark.s3
def test_what_came_damaged_from_the_store_is_not_kept(cache: NodeCache, put: Any, s3_store: str, tmp_path: Path):
    storage = Storage(s3_store)
    (tmp_path / "bundle").mkdir()
    put(CONTENT, "bundle/a.bin")
    manifest, _ = bundle.publish(storage, "p", str(tmp_path / "bundle"), kind="test", meta={})
    storage.write(manifest.path("p", "a.bin"), CONTENT[::-1])

    with pytest.raises(DamagedError):
        bundle.fetch(storage, "p", manifest, str(tmp_path / "back"), cache)

    assert not os.path.exists(cache.folder)


def numbered(number: int) -> bytes:
    return b"%010d" % number * 100


def test_those_used_longest_ago_go(cache: NodeCache, put: Any, tmp_path: Path):
    for number in (1, 2, 3):
        cache.keep(digest(numbered(number)), put(numbered(number), f"{number}"))
        os.utime(Path(cache.folder) / digest(numbered(number)), (number, number))
    assert taken(cache, numbered(1), tmp_path)

    cache.keep(digest(numbered(4)), put(numbered(4), "4"))

    assert [taken(cache, numbered(number), tmp_path) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_file_larger_than_the_cache_drives_nothing_out(cache: NodeCache, put: Any, tmp_path: Path):
    cache.keep(digest(CONTENT), put())

    cache.keep(digest(CONTENT * 4), put(CONTENT * 4, "large"))

    assert os.listdir(cache.folder) == [digest(CONTENT)]


def test_a_folder_that_cannot_be_made_is_passed_over(put: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache = NodeCache(f"{put(b'', 'file')}/cache", 1e9)

    cache.keep(digest(CONTENT), put())

    assert not taken(cache, CONTENT, tmp_path)
    assert "does not take" in caplog.text


def refuse_changes(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Have a folder refuse changes, as one that is mounted read-only does; tests may run as root."""

    def guard(function: Any, which: int) -> Any:
        def guarded(*arguments: Any, **options: Any) -> Any:
            if os.fspath(arguments[which]).startswith(folder):
                raise OSError(30, "Read-only file system")
            return function(*arguments, **options)

        return guarded

    for name, which in (("link", 1), ("replace", 1), ("unlink", 0), ("utime", 0)):
        monkeypatch.setattr(os, name, guard(getattr(os, name), which))
    monkeypatch.setattr(shutil, "copyfile", guard(shutil.copyfile, 1))


def test_a_folder_that_is_read_only_gives_and_takes_nothing(
    cache: NodeCache, put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache.keep(digest(CONTENT), put())
    cache.keep(digest(numbered(1)), put(numbered(1), "1"))
    (Path(cache.folder) / digest(numbered(1))).write_bytes(b"damaged")
    refuse_changes(monkeypatch, cache.folder)

    cache.keep(digest(b"new"), put(b"new", "new"))

    assert taken(cache, CONTENT, tmp_path)
    assert not taken(cache, numbered(1), tmp_path)
    assert not taken(cache, b"new", tmp_path)


def use(folder: str, own: str, barrier: Any) -> None:
    """Keep and take ten files for which there is no room at once."""
    cache = NodeCache(folder, 4 * len(CONTENT))
    os.makedirs(own)
    barrier.wait()
    for repeat in range(30):
        for number in range(10):
            path = f"{own}/{repeat}-{number}"
            if not cache.take(digest(numbered(number)), path):
                Path(path).write_bytes(numbered(number))
                cache.keep(digest(numbered(number)), path)
            assert Path(path).read_bytes() == numbered(number)


def test_several_processes_share_it(cache: NodeCache, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    workers = [
        context.Process(target=use, args=(cache.folder, str(tmp_path / f"own-{number}"), barrier))
        for number in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert {len(name) for name in os.listdir(cache.folder)} == {64}  # no name of a file half kept
    total = sum(os.path.getsize(Path(cache.folder) / name) for name in os.listdir(cache.folder))
    assert total <= 7 * len(CONTENT)  # each may have made room for its own


SIZES = {"100": 100, "2k": 2000, "1.5M": 1.5e6, "50Gi": 50 * 2**30, "2Ti": 2 * 2**40, "1P": 1e15, "1Pi": 2**50}


@pytest.mark.parametrize(("size", "expected"), SIZES.items(), ids=SIZES)
def test_the_size_a_recipe_gives(size: str, expected: float, tmp_path: Path):
    cache = NodeCache.of(Store(cache_dir=str(tmp_path), cache_size=size))

    assert cache is not None
    assert (cache.folder, cache.max_bytes) == (str(tmp_path), expected)


def test_a_recipe_may_name_none():
    assert NodeCache.of(Store()) is None


def test_a_copy_that_a_killed_process_left_half_made_goes(cache: NodeCache, put: Any):
    cache.keep(digest(b"first"), put(b"first"))
    old, young = (os.path.join(cache.folder, f"{digest(name)}.0123abcd") for name in (b"old", b"young"))
    for path in (old, young):
        Path(path).write_bytes(b"half")
    hours_ago = time.time() - 2 * 3600
    for path in (old, os.path.join(cache.folder, digest(b"first"))):
        os.utime(path, (hours_ago, hours_ago))
    cache.keep(digest(b"second"), put(b"second"))
    assert {digest(b"first"), digest(b"second"), os.path.basename(young)} == set(os.listdir(cache.folder))
