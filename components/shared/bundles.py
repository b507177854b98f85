"""Bundles: folders of files committed to the store as one, by a manifest written last.

    <prefix>/<attempt>/{files…}      what one writer uploaded
    <prefix>/manifest.json           sizes, SHA-256, and whose files they are: put-if-absent

Every writer uploads below a name of its own, so that one who finishes late cannot touch the files
of the one whose manifest was first. Readers see a prefix only once it has a manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from components.shared.errors import DamagedError
from components.shared.storage import Storage

MANIFEST = "manifest.json"
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
    if storage.create(f"{prefix}/{MANIFEST}", json.dumps(asdict(manifest), indent=1, sort_keys=True).encode()):
        return manifest, True
    standing = read_manifest(storage, prefix)
    if standing is None:
        raise DamagedError(f"{storage.uri(prefix)}: its manifest vanished while another writer committed it.")
    return standing, False


def read_manifest(storage: Storage, prefix: str) -> Manifest | None:
    """Returns what is committed under a prefix, or None where nothing is.

    Raises:
        DamagedError: the manifest is not one, or names files outside its folder.
    """
    try:
        data = storage.read(f"{prefix}/{MANIFEST}")
    except FileNotFoundError:
        return None
    where = storage.uri(f"{prefix}/{MANIFEST}")
    try:
        manifest = Manifest(**json.loads(data))
        for name, entry in manifest.files.items():
            if not (_is_safe(name) and isinstance(entry["size"], int) and len(entry["sha256"]) == 64):
                raise ValueError(f"file entry {name!r} is not a relative name with size and sha256")
        if manifest.version != VERSION or not _is_safe(manifest.folder) or not isinstance(manifest.meta, dict):
            raise ValueError(f"version {manifest.version!r}, folder {manifest.folder!r}")
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
        DamagedError: a file is missing or its SHA-256 differs.
    """
    target = storage.key(manifest.path(prefix)) if storage.is_local else local_dir

    def receive(name: str) -> str | None:
        return _problem(storage, prefix, manifest, name, None if storage.is_local else os.path.join(target, name))

    _raise_problems(storage, prefix, _each(receive, manifest.files))
    return target


def verify(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Reads every file of a bundle back and returns a line for each that is not what was committed."""
    return [
        line for line in _each(lambda name: _problem(storage, prefix, manifest, name, None), manifest.files) if line
    ]


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


def _raise_problems(storage: Storage, prefix: str, problems: list[str | None]) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise DamagedError(f"{storage.uri(prefix)} is damaged: {'; '.join(found)}.")


def _files_below(folder: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/")
        for parent, _, names in os.walk(folder)
        for name in names
    ]


def _is_safe(name: Any) -> bool:
    path = PurePosixPath(name) if isinstance(name, str) and name else None
    return path is not None and not path.is_absolute() and ".." not in path.parts and "\\" not in str(name)
