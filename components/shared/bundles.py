"""Bundles: folders of files committed to the store as one, by a manifest written last.

    <prefix>/<attempt>/{files…}      what one writer uploaded
    <prefix>/manifest.json           sizes, SHA-256, and whose files they are: put-if-absent
    <prefix>/damaged-<attempt>       a reader found files of this attempt that differ from its manifest
    <prefix>/removed-<attempt>       retention is taking this attempt away (see `retention`)
    <prefix>/manifest-2.json         what was committed in place of a damaged one: put-if-absent

Every writer uploads below a name of its own, so that one who finishes late cannot touch the files
of the one whose manifest was first. Readers see a prefix only once it has a manifest, and take the
highest. Nothing is ever replaced, so there is no moment at which two processes can undo each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, TypeVar

from components.shared.cache import NodeCache
from components.shared.errors import DamagedError, MarkedError, UnavailableError
from components.shared.storage import Storage

_GENERATION = re.compile(r"^manifest(?:-([1-9][0-9]*))?\.json$")
DAMAGED = "damaged-"
REMOVED = "removed-"
VERSION = 1
T = TypeVar("T")
R = TypeVar("R")
PARALLEL = 8
"""Files in flight at once."""
ROUNDS = 5
"""Times a commit looks again after another writer's manifest came in its way and was gone."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was committed under a prefix.

    Attributes:
        kind: What the files are, such as `checkpoint` or `tokens`.
        folder: The attempt whose files these are, relative to the prefix.
        files: Relative name → `{"size": bytes, "sha256": hex}`.
        meta: What the writer had to say about them.
    """

    kind: str
    folder: str
    files: dict[str, dict[str, Any]]
    meta: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(int(entry["size"]) for entry in self.files.values())

    def path(self, prefix: str, name: str = "") -> str:
        """Returns where a file lies, or their folder."""
        return f"{prefix}/{self.folder}/{name}".rstrip("/")


class Publication:
    """One writer's attempt at a bundle: files first, then the manifest.

    Args:
        storage: Where to.
        prefix: Path of the bundle in the store.
        kind: What the files are.
        check: Called every few megabytes; what it raises ends the attempt.
    """

    def __init__(self, storage: Storage, prefix: str, *, kind: str, check: Callable[[], None] = lambda: None) -> None:
        self.storage = storage
        self.prefix = prefix
        self.kind = kind
        self.folder = uuid.uuid4().hex[:12]
        self.files: dict[str, dict[str, Any]] = {}
        self._check = check

    def send(self, local_dir: str) -> None:
        """Uploads the files of a folder, at any depth; those sent before are not sent again."""

        def upload(name: str) -> None:
            local = os.path.join(local_dir, name)
            digest = self.storage.upload(local, f"{self.prefix}/{self.folder}/{name}", self._check)
            self.files[name] = {"size": os.path.getsize(local), "sha256": digest}

        each(upload, sorted(set(_files_below(local_dir)) - self.files.keys()))

    def commit(self, meta: dict[str, Any]) -> tuple[Manifest, bool]:
        """Writes the manifest, unless another writer was first.

        Returns:
            The manifest that stands, and whether it is this attempt's.

        Raises:
            UnavailableError: other writers come and go, and none of their manifests stays.
        """
        manifest = Manifest(kind=self.kind, folder=self.folder, files=dict(sorted(self.files.items())), meta=meta)
        data = json.dumps(asdict(manifest), indent=1, sort_keys=True).encode()
        for _ in range(ROUNDS):
            standing, generation = _standing(self.storage, self.prefix)
            if standing is None and self.storage.create(f"{self.prefix}/{_manifest_name(generation + 1)}", data):
                return manifest, True
            if standing is not None:  # ours where the answer to a put was lost
                return standing, standing.folder == self.folder
        raise UnavailableError(f"{self.storage.uri(self.prefix)} could not be committed in {ROUNDS} rounds.")


def publish(storage: Storage, prefix: str, local_dir: str, *, kind: str, meta: dict[str, Any]) -> tuple[Manifest, bool]:
    """Uploads a folder and commits it.

    Args:
        storage: Where to.
        prefix: Path of the bundle in the store.
        local_dir: Folder whose files, at any depth, are the bundle.
        kind: What the files are.
        meta: Goes into the manifest; plain JSON values.

    Returns:
        The manifest that stands, and whether it is this call's: False when another writer was first.
    """
    publication = Publication(storage, prefix, kind=kind)
    publication.send(local_dir)
    return publication.commit(meta)


def read_manifest(storage: Storage, prefix: str) -> Manifest | None:
    """Returns what is committed under a prefix, or None where nothing is.

    Raises:
        DamagedError: the manifest is not one, names files outside its folder, or was marked as damaged.
    """
    return _read_newest(storage, prefix, storage.list(prefix))


def _read_newest(storage: Storage, prefix: str, names: list[str]) -> Manifest | None:
    """Reads the manifest of the highest generation among the names below a prefix."""
    generation = _highest(names)
    if generation == 0:
        return None
    path = f"{prefix}/{_manifest_name(generation)}"
    try:
        manifest = _parsed(storage.read(path), storage.uri(path))
    except FileNotFoundError:  # retention took it between the listing and this
        return None
    if REMOVED + manifest.folder in names:
        return None
    if DAMAGED + manifest.folder in names:
        raise DamagedError(f"{storage.uri(prefix)} was found damaged before.")
    return manifest


def usable_manifest(storage: Storage, prefix: str) -> Manifest | None:
    """Returns what is committed under a prefix, or None where nothing is or it is damaged: then write it anew."""
    return _standing(storage, prefix)[0]


def is_whole(storage: Storage, prefix: str, manifest: Manifest) -> bool:
    """Tells whether all files of a bundle are there in full size, which costs one listing."""
    return not torn_files(storage, prefix, manifest)


def torn_files(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Returns a line for each file of a bundle that is missing or not of its size, which costs one listing."""
    present = storage.find(manifest.path(prefix))
    lines = []
    for name, entry in manifest.files.items():
        if name not in present:
            lines.append(f"{name}: missing")
        elif present[name][0] != entry["size"]:
            lines.append(f"{name}: {present[name][0]} bytes, committed were {entry['size']}")
    return lines


def mark_damaged(storage: Storage, prefix: str, manifest: Manifest) -> None:
    """Notes that files differ from their manifest, so that the bundle can be committed again."""
    storage.write(f"{prefix}/{DAMAGED}{manifest.folder}", b"")


def _standing(storage: Storage, prefix: str) -> tuple[Manifest | None, int]:
    """Returns what is committed and whole as far as anyone knows, and the highest generation there is."""
    names = storage.list(prefix)
    try:
        manifest = _read_newest(storage, prefix, names)
    except DamagedError:
        manifest = None
    return manifest, _highest(names)


def _highest(names: list[str]) -> int:
    """Returns the highest generation of a manifest among names, 0 where there is none."""
    matches = (_GENERATION.match(name) for name in names)
    return max((int(match[1] or 1) for match in matches if match), default=0)


def _manifest_name(generation: int) -> str:
    return "manifest.json" if generation == 1 else f"manifest-{generation}.json"


def _parsed(data: bytes, where: str) -> Manifest:
    try:
        document = json.loads(data)
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']!r}")
        manifest = Manifest(**document)
        for name, entry in manifest.files.items():
            if not (_is_safe(name) and isinstance(entry["size"], int) and len(entry["sha256"]) == 64):
                raise ValueError(f"file entry {name!r} is not a relative name with size and sha256")
        if not _is_safe(manifest.folder) or not isinstance(manifest.meta, dict):
            raise ValueError(f"folder {manifest.folder!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{where} is not a manifest of version {VERSION}: {error}.") from None
    return manifest


def fetch(
    storage: Storage,
    prefix: str,
    manifest: Manifest,
    local_dir: str,
    cache: NodeCache | None = None,
    names: Iterable[str] | None = None,
) -> str:
    """Brings a bundle to this machine, checking every byte.

    Args:
        storage: Where from.
        prefix: Path of the bundle in the store.
        manifest: What is committed there.
        local_dir: Folder for the files, unless the store is one itself: then they are read in place.
        cache: Files this node has already, by their hashes.
        names: The files that are wanted; all of them when None.

    Returns:
        The folder with the files.

    Raises:
        DamagedError: a file is missing or its SHA-256 differs; the bundle is marked.
    """
    target = storage.key(manifest.path(prefix)) if storage.is_local else local_dir
    present = storage.find(manifest.path(prefix))

    def receive(name: str) -> str | None:
        if storage.is_local:
            return _problem(storage, prefix, manifest, name, present, None)
        local_path, digest = os.path.join(target, name), manifest.files[name]["sha256"]
        if cache and cache.take(digest, local_path):
            return None
        problem = _problem(storage, prefix, manifest, name, present, local_path)
        if cache and problem is None:
            cache.keep(digest, local_path)
        return problem

    wanted = manifest.files if names is None else names
    require_whole(storage, prefix, manifest, [line for line in each(receive, sorted(wanted)) if line])
    return target


def verify(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Reads every file of a bundle back and returns a line for each that is not what was committed."""
    present = storage.find(manifest.path(prefix))
    lines = each(lambda name: _problem(storage, prefix, manifest, name, present, None), sorted(manifest.files))
    return [line for line in lines if line]


def require_whole(storage: Storage, prefix: str, manifest: Manifest, problems: list[str]) -> None:
    """Marks a bundle in which problems were found.

    Raises:
        MarkedError: there are any.
    """
    if problems:
        if usable_manifest(storage, prefix) != manifest:
            raise MarkedError(f"{storage.uri(prefix)} was removed or replaced while it was read.", remedy="Run again.")
        mark_damaged(storage, prefix, manifest)
        raise MarkedError(
            f"{storage.uri(prefix)} is damaged: {'; '.join(problems)}.", remedy="Run again: it will be made anew."
        )


def file_sha256(local_path: str) -> str:
    """Returns the SHA-256 of a local file."""
    with open(local_path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def each(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Does something with each item, several at a time, and returns the results in the items' order."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(work, items))


def _problem(
    storage: Storage,
    prefix: str,
    manifest: Manifest,
    name: str,
    present: dict[str, tuple[int, datetime]],
    local_path: str | None,
) -> str | None:
    """Reads a file, to a local path or to nowhere, and returns what is wrong with it."""
    expected, path = manifest.files[name], manifest.path(prefix, name)
    size = present[name][0] if name in present else None
    if size not in (None, expected["size"]):
        return f"{name}: {size} bytes, committed were {expected['size']}"
    try:
        if local_path:
            digest = storage.download(path, local_path, expected["size"])
        else:
            digest = storage.sha256(path)[1]
    except FileNotFoundError:
        return f"{name}: missing"
    return None if digest == expected["sha256"] else f"{name}: SHA-256 is {digest}, committed was {expected['sha256']}"


def _files_below(folder: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/")
        for parent, _, names in os.walk(folder)
        for name in names
    ]


def _is_safe(name: Any) -> bool:
    if not isinstance(name, str) or "\\" in name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
