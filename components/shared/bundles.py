"""Bundles: folders of files committed to the store as one, by a manifest written last.

    <prefix>/<attempt>/{files…}      what one writer uploaded
    <prefix>/manifest.json           sizes, SHA-256, and whose files they are: put-if-absent
    <prefix>/damaged-<attempt>       a reader found files of this attempt that differ from its manifest
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from components.shared.errors import DamagedError
from components.shared.storage import Storage

_GENERATION = re.compile(r"^manifest(?:-([1-9][0-9]*))?\.json$")
_DAMAGED = "damaged-"
VERSION = 1
PARALLEL = 8
"""Files in flight at once."""


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


def publish(
    storage: Storage,
    prefix: str,
    local_dir: str,
    *,
    kind: str,
    meta: dict[str, Any],
    before_commit: Callable[[], None] = lambda: None,
) -> tuple[Manifest, bool]:
    """Uploads a folder and commits it.

    Args:
        storage: Where to.
        prefix: Path of the bundle in the store.
        local_dir: Folder whose files, at any depth, are the bundle.
        kind: What the files are.
        meta: Goes into the manifest; plain JSON values.
        before_commit: Called between the last file and the manifest.

    Returns:
        The manifest that stands, and whether it is this call's: False when another writer was first.
    """
    folder = uuid.uuid4().hex[:12]
    names = sorted(_files_below(local_dir))

    def send(name: str) -> dict[str, Any]:
        local = os.path.join(local_dir, name)
        storage.upload(local, f"{prefix}/{folder}/{name}")
        return {"size": os.path.getsize(local), "sha256": file_sha256(local)}

    with ThreadPoolExecutor(PARALLEL) as pool:
        files = dict(zip(names, pool.map(send, names), strict=True))
    manifest = Manifest(kind=kind, folder=folder, files=files, meta=meta)
    before_commit()
    standing, generation = _standing(storage, prefix)
    if standing is None:
        data = json.dumps(asdict(manifest), indent=1, sort_keys=True).encode()
        if storage.create(f"{prefix}/{_manifest_name(generation + 1)}", data):
            return manifest, True
        standing, _ = _standing(storage, prefix)
    if standing is None:
        raise DamagedError(f"{storage.uri(prefix)}: another writer committed it at the same time, and it is damaged.")
    return standing, standing.folder == folder  # our own where the answer to the first try was lost


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
    manifest = _parsed(storage.read(path), storage.uri(path))
    if _DAMAGED + manifest.folder in names:
        raise DamagedError(f"{storage.uri(prefix)} was found damaged before.")
    return manifest


def usable_manifest(storage: Storage, prefix: str) -> Manifest | None:
    """Returns what is committed under a prefix, or None where nothing is or it is damaged: then write it anew."""
    return _standing(storage, prefix)[0]


def mark_damaged(storage: Storage, prefix: str, manifest: Manifest) -> None:
    """Notes that files differ from their manifest, so that the bundle can be committed again."""
    storage.write(f"{prefix}/{_DAMAGED}{manifest.folder}", b"")


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


def fetch(storage: Storage, prefix: str, manifest: Manifest, local_dir: str) -> str:
    """Brings a bundle to this machine, checking every byte.

    Args:
        storage: Where from.
        prefix: Path of the bundle in the store.
        manifest: What is committed there.
        local_dir: Folder for the files, unless the store is one itself: then they are read in place.

    Returns:
        The folder with the files.

    Raises:
        DamagedError: a file is missing or its SHA-256 differs; the bundle is marked.
    """
    target = storage.key(manifest.path(prefix)) if storage.is_local else local_dir

    def receive(name: str) -> str | None:
        return _problem(storage, prefix, manifest, name, None if storage.is_local else os.path.join(target, name))

    require_whole(storage, prefix, manifest, [line for line in _each(receive, manifest.files) if line])
    return target


def verify(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Reads every file of a bundle back and returns a line for each that is not what was committed."""
    return [
        line for line in _each(lambda name: _problem(storage, prefix, manifest, name, None), manifest.files) if line
    ]


def require_whole(storage: Storage, prefix: str, manifest: Manifest, problems: list[str]) -> None:
    """Marks a bundle in which problems were found.

    Raises:
        DamagedError: there are any.
    """
    if problems:
        mark_damaged(storage, prefix, manifest)
        raise DamagedError(
            f"{storage.uri(prefix)} is damaged: {'; '.join(problems)}.", remedy="Run again: it will be made anew."
        )


def file_sha256(local_path: str) -> str:
    """Returns the SHA-256 of a local file."""
    with open(local_path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _each(check: Callable[[str], str | None], files: dict[str, dict[str, Any]]) -> list[str | None]:
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(check, sorted(files)))


def _problem(storage: Storage, prefix: str, manifest: Manifest, name: str, local_path: str | None) -> str | None:
    expected, path = manifest.files[name], manifest.path(prefix, name)
    try:
        digest = storage.download(path, local_path) if local_path else storage.sha256(path)[1]
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
