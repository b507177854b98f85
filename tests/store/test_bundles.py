"""Bundles: what is committed stands, what is not is not seen, and damage has a name."""

import json
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DamagedError, FormatError
from baton.store import bundle
from baton.store.bundle import BundleWriter
from baton.store.manifest import REMOVED, Manifest, mark_damaged, read_manifest, usable_manifest
from baton.store.storage import Storage

FILES = {"weights.bin": b"\x00\x01" * 500, "a/b/deep.json": b"{}", "empty": b"", "a/ünï code.txt": b"x"}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A local folder with files at several depths."""
    for name, content in FILES.items():
        path = tmp_path / "bundle" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(tmp_path / "bundle")


def publish(storage: Storage, folder: str, **options: Any) -> tuple[Manifest, bool]:
    """Publish a folder under `p/q`."""
    return bundle.publish(storage, "p/q", folder, kind="test", **{"meta": {"step": 3}, **options})


def contents(folder: str) -> dict[str, bytes]:
    """Read all files below a folder."""
    root = Path(folder)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_round_trip(store: str, folder: str, tmp_path: Path):
    storage = Storage(store)
    published, ours = publish(storage, folder)
    manifest = read_manifest(storage, "p/q")

    assert ours
    assert manifest == published
    assert (manifest.kind, manifest.meta, manifest.bytes) == ("test", {"step": 3}, 1003)
    assert contents(bundle.fetch(storage, "p/q", manifest, str(tmp_path / "back"))) == FILES
    assert bundle.verify(storage, "p/q", manifest) == []


def test_nothing_is_seen_before_the_manifest(store: str, folder: str):
    storage = Storage(store)
    writer = bundle.BundleWriter(storage, "p/q", kind="test")

    writer.send(folder)
    assert read_manifest(storage, "p/q") is None
    manifest, ours = writer.commit({"step": 3})

    assert ours
    assert read_manifest(storage, "p/q") == manifest


def test_a_writer_that_dies_before_the_manifest_leaves_the_place_free(store: str, folder: str, tmp_path: Path):
    storage = Storage(store)

    bundle.BundleWriter(storage, "p/q", kind="test").send(folder)
    assert read_manifest(storage, "p/q") is None
    manifest, ours = publish(storage, folder)

    assert ours
    assert contents(bundle.fetch(storage, "p/q", manifest, str(tmp_path / "back"))) == FILES


def test_what_is_called_while_sending_can_end_the_attempt(store: str, folder: str):
    storage = Storage(store)

    def die() -> None:
        raise SystemExit(137)

    with pytest.raises(SystemExit):
        bundle.BundleWriter(storage, "p/q", kind="test", check=die).send(folder)

    assert read_manifest(storage, "p/q") is None
    assert publish(storage, folder)[1]


def test_a_folder_sent_in_parts_is_one_bundle(store: str, folder: str, tmp_path: Path):
    """As a machine does that has room for a single file."""
    storage = Storage(store)
    writer = bundle.BundleWriter(storage, "p/q", kind="test")
    parts = [tmp_path / "first", tmp_path / "second"]
    for part, name in zip(parts, ("weights.bin", "empty"), strict=True):
        part.mkdir()
        (part / name).write_bytes(FILES[name])

    for part in parts:
        writer.send(str(part))
        (part / next(part.iterdir())).unlink()
    manifest, _ = writer.commit({})

    assert contents(bundle.fetch(storage, "p/q", manifest, str(tmp_path / "back"))) == {
        name: FILES[name] for name in ("weights.bin", "empty")
    }


def test_a_late_writer_loses_and_harms_nothing(store: str, folder: str, tmp_path: Path):
    storage, other = Storage(store), tmp_path / "other"
    other.mkdir()
    (other / "weights.bin").write_bytes(b"other")
    late = bundle.BundleWriter(storage, "p/q", kind="test")

    late.send(str(other))
    first, won = publish(storage, folder)
    committed, ours = late.commit({"step": 4})

    assert won
    assert not ours
    assert committed == first == read_manifest(storage, "p/q")
    assert bundle.verify(storage, "p/q", committed) == []
    assert contents(bundle.fetch(storage, "p/q", committed, str(tmp_path / "back"))) == FILES


class LostAnswer(Storage):
    """A store whose first answer to a put-if-absent is lost, so that the client tries again."""

    def create(self, path: str, data: bytes) -> bool:
        """Create twice, as a client does that got no answer."""
        super().create(path, data)
        return super().create(path, data)


def test_a_writer_whose_answer_was_lost_still_won(store: str, folder: str):
    manifest, ours = publish(LostAnswer(store), folder)

    assert ours
    assert read_manifest(Storage(store), "p/q") == manifest


class RemovedMeanwhile(Storage):
    """A store whose answer to a put-if-absent comes late: retention has taken the bundle, or is about to."""

    is_done = False

    def create(self, path: str, data: bytes) -> bool:
        """Creates it, as another process then finds."""
        created = super().create(path, data)
        prefix, writer = path.rpartition("/")[0], self.writer
        if not writer.files or self.was_taken:
            return created
        self.was_taken = True
        super().write(f"{prefix}/{REMOVED}{writer.folder}", b"")
        super().remove(path)
        if self.is_done:
            for name in writer.files:
                super().remove(f"{prefix}/{writer.folder}/{name}")
            super().remove(f"{prefix}/{REMOVED}{writer.folder}")
        return False

    was_taken = False
    writer: bundle.BundleWriter


@pytest.mark.parametrize("is_done", [False, True], ids=["while it is removed", "once it is removed"])
def test_a_writer_whose_answer_was_lost_does_not_commit_what_was_removed(
    is_done: bool, tmp_path: Path, folder: str
) -> None:
    storage = RemovedMeanwhile(str(tmp_path / "store"))
    storage.is_done = is_done
    storage.writer = bundle.BundleWriter(storage, "p/q", kind="test")
    storage.writer.send(folder)
    manifest, ours = storage.writer.commit({})
    assert ours
    assert manifest.folder == storage.writer.folder
    assert not [name for name in storage.list("p/q") if name.startswith("manifest")]


def test_where_a_listing_has_no_manifest_none_is_asked_for(tmp_path: Path) -> None:
    """A run of many steps asks its store for each."""

    class Listed(Storage):
        def read(self, path: str) -> bytes:
            raise AssertionError(path)

    storage = Listed(str(tmp_path / "store"))
    storage.write("p/q/0123456789ab/weights.bin", b"1")
    assert read_manifest(storage, "p/q") is None


DAMAGE: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "truncated": (lambda content: content[:-1], "weights.bin: 999 bytes, committed were 1000"),
    "grown": (lambda content: content + b"\0", "weights.bin: 1001 bytes, committed were 1000"),
    "one bit": (lambda content: bytes([content[0] ^ 1]) + content[1:], "weights.bin: SHA-256 is "),
    "missing": (lambda content: None, "weights.bin: missing"),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found(damage: Any, expected: str, store: str, folder: str, tmp_path: Path):
    storage = Storage(store)
    manifest, _ = publish(storage, folder)
    path = manifest.path("p/q", "weights.bin")
    if (content := damage(FILES["weights.bin"])) is None:
        storage.remove(path)
    else:
        storage.write(path, content)

    with pytest.raises(DamagedError) as caught:
        bundle.fetch(storage, "p/q", manifest, str(tmp_path / "back"))
    problems = bundle.verify(storage, "p/q", manifest)

    assert f"{store}/p/q is damaged: {expected}" in str(caught.value)
    assert len(problems) == 1
    assert problems[0].startswith(expected)


def test_all_damage_is_named(store: str, folder: str):
    storage = Storage(store)
    manifest, _ = publish(storage, folder)
    for name in ("weights.bin", "a/b/deep.json"):
        storage.write(manifest.path("p/q", name), b"other")

    assert [line.split(":")[0] for line in bundle.verify(storage, "p/q", manifest)] == ["a/b/deep.json", "weights.bin"]


GOOD = {
    "version": 1,
    "kind": "test",
    "folder": "0123456789ab",
    "files": {"a": {"size": 1, "sha256": "0" * 64}},
    "meta": {},
}
ENTRY = {"size": 1, "sha256": "0" * 64}
BAD: dict[str, bytes] = {
    "not JSON": b"{",
    "empty": b"",
    "not UTF-8": b"\xff\xfe\xff",
    "a list": b"[]",
    "a number": b"7",
    "too deep for Python": b"[" * 100_000,
    "deep": json.dumps(GOOD).replace("{}", "[" * 200 + "]" * 200).encode(),
    "digits": json.dumps(GOOD).replace('"size": 1', f'"size": {"9" * 5000}').encode(),
    **{f"no {key}": json.dumps({k: v for k, v in GOOD.items() if k != key}).encode() for key in GOOD if key != "meta"},
    **{
        name: json.dumps({**GOOD, **changes}).encode()
        for name, changes in {
            "an older version": {"version": 0},
            "no version": {"version": "2"},
            "unknown key": {"extra": 1},
            "parent": {"files": {"../../x": ENTRY}},
            "parent inside": {"files": {"a/../../x": ENTRY}},
            "absolute": {"files": {"/etc/passwd": ENTRY}},
            "backslash": {"files": {"a\\..\\x": ENTRY}},
            "NUL": {"files": {"a\0": ENTRY}},
            "no name": {"files": {"": ENTRY}},
            "a dot": {"files": {".": ENTRY}},
            "folder above": {"folder": ".."},
            "absolute folder": {"folder": "/etc"},
            "folder of no name": {"folder": ""},
            "folder is a number": {"folder": 3},
            "files are a list": {"files": ["a"]},
            "entry is a number": {"files": {"a": 1}},
            "no size": {"files": {"a": {"sha256": "0" * 64}}},
            "size in words": {"files": {"a": {"size": "1", "sha256": "0" * 64}}},
            "short hash": {"files": {"a": {"size": 1, "sha256": "0"}}},
            "no hash": {"files": {"a": {"size": 1, "sha256": "z" * 64}}},
            "hash in capitals": {"files": {"a": {"size": 1, "sha256": "A" * 64}}},
            "hash is a list": {"files": {"a": {"size": 1, "sha256": ["0"] * 64}}},
            "size below nothing": {"files": {"a": {**ENTRY, "size": -1}}},
            "size beyond any": {"files": {"a": {**ENTRY, "size": 2**63}}},
            "size is true": {"files": {"a": {**ENTRY, "size": True}}},
            "half a character": {"files": {"a\ud800": ENTRY}},
            "name too long": {"files": {"a" * 256: ENTRY}},
            "folder too long": {"files": {"a" * 256 + "/b": ENTRY}},
            "name in a folder too long": {"files": {"a/" + "b" * 256: ENTRY}},
            "half a character in a folder": {"files": {"\ud800/a": ENTRY}},
            "parent at the end": {"files": {"a/..": ENTRY}},
            "a dot inside": {"files": {"a/./b": ENTRY}},
            "name with a gap": {"files": {"a//b": ENTRY}},
            "a file in a file": {"files": {"a": ENTRY, "a/b/c": ENTRY}},
            "meta is a list": {"meta": []},
        }.items()
    },
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_manifest_that_is_none(content: bytes, store: str):
    storage = Storage(store)
    storage.write("p/q/manifest.json", content)

    with pytest.raises(DamagedError) as caught:
        read_manifest(storage, "p/q")

    assert str(caught.value).startswith(f"{store}/p/q/manifest.json is not a manifest of version 1: ")
    assert caught.value.exit_code == 1


def test_a_newer_manifest_is_refused_and_not_taken_for_damage(store: str):
    storage = Storage(store)
    storage.write("p/q/manifest.json", json.dumps({**GOOD, "version": 2, "extra": 1}).encode())

    for read in (read_manifest, usable_manifest):
        with pytest.raises(FormatError, match=r"of version 2, and this Baton reads version 1\. Use"):
            read(storage, "p/q")


def test_the_manifest_the_bad_ones_derive_from_is_good(store: str):
    storage = Storage(store)
    storage.write("p/q/manifest.json", json.dumps(GOOD).encode())

    manifest = read_manifest(storage, "p/q")

    assert manifest is not None
    assert manifest.path("p/q", "a") == "p/q/0123456789ab/a"


@given(name=st.lists(st.sampled_from(["..", ".", "/", "a", "\\", "b.c", " ", "~", "\0"]), max_size=6).map("".join))
def test_a_name_that_is_read_stays_in_its_folder(name: str, tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.getbasetemp() / "names"
    storage = Storage(str(root))
    storage.write("p/manifest.json", json.dumps({**GOOD, "files": {name: ENTRY}}).encode())
    folder = f"{root}/p/{GOOD['folder']}"
    escapes = name.startswith("/") or "\\" in name or "\0" in name or ".." in PurePosixPath(name).parts
    try:
        manifest = read_manifest(storage, "p")
    except DamagedError:
        assert escapes or PurePosixPath(name).parts == ()
        return
    assert manifest is not None
    assert not escapes
    assert os.path.normpath(storage.key(manifest.path("p", name))).startswith(f"{folder}/")


def test_what_killed_writers_left_beside_a_bundle_goes(store: str, folder: str, tmp_path: Path):
    storage = Storage(store)
    killed, slept = (BundleWriter(storage, "bundle", kind="test") for _ in range(2))
    for writer in (killed, slept):
        writer.send(folder)
    storage.write("bundle/exports/note.json", b"{}")  # no writer's
    manifest, won = bundle.publish(storage, "bundle", folder, kind="test", meta={})
    assert won
    bundle.clear_others(storage, "bundle", manifest)
    assert bundle.verify(storage, "bundle", manifest) == []
    marks = {f"removed-{writer.folder}" for writer in (killed, slept)}
    own = {f"{manifest.folder}/{name}" for name in manifest.files}
    assert set(storage.find("bundle")) == {"manifest.json", "exports/note.json"} | marks | own
    # The one that slept commits after all, above one that was found damaged: nobody reads files that are gone.
    mark_damaged(storage, "bundle", manifest)
    slept.commit({})
    assert usable_manifest(storage, "bundle") is None
    again, won = bundle.publish(storage, "bundle", folder, kind="test", meta={})
    assert won
    assert usable_manifest(storage, "bundle") == again
