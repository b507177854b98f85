"""Reads commits under a prefix: manifests by generation, and their marks.

    <prefix>/manifest.json           sizes, SHA-256, and the writer of its files: put-if-absent
    <prefix>/damaged-<attempt>       a reader found files of this attempt that differ from its manifest
    <prefix>/removed-<attempt>       retention is removing this attempt (see `retention`)
    <prefix>/manifest-2.json         the commit in place of a damaged or removed one: put-if-absent

Readers take the highest generation. Nothing is ever replaced, so there is no moment at which two processes can undo
each other's work.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NotRequired, TypedDict

from baton.documents import load
from baton.errors import DamagedError, FormatError, RewritableDamageError
from baton.store.storage import Storage

DAMAGED = "damaged-"
REMOVED = "removed-"
VERSION = 1
MOST_BYTES = 2**63 - 1  # largest file of any file system
LONGEST_NAME = 255  # bytes of the longest part of a path
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_GENERATION = re.compile(r"^manifest(?:-([1-9][0-9]*))?\.json$")


class FileEntry(TypedDict):
    size: int
    sha256: str
    origin: NotRequired[str]  # attempt that sent it, where this one has copied it inside the store


@dataclass(frozen=True, kw_only=True)
class Manifest:
    kind: str  # such as `checkpoint` or `tokens`
    folder: str  # attempt whose files these are
    files: dict[str, FileEntry]  # by relative name
    meta: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def bytes(self) -> int:
        return sum(entry["size"] for entry in self.files.values())

    def path(self, prefix: str, name: str = "") -> str:
        return f"{prefix}/{self.folder}/{name}".rstrip("/")

    def as_written(self) -> str:
        return json.dumps(vars(self), indent=1, sort_keys=True)


def read_manifest(storage: Storage, prefix: str, names: Sequence[str] | None = None) -> Manifest | None:
    """Returns the manifest committed under a prefix, None where there is none; DamagedError for a marked bundle."""
    return _read_newest(storage, prefix, storage.list(prefix) if names is None else names)


def usable_manifest(storage: Storage, prefix: str) -> Manifest | None:
    """Returns the manifest committed under a prefix; None where there is none or the bundle is marked as damaged."""
    return newest_usable(storage, prefix)[0]


def newest_usable(storage: Storage, prefix: str) -> tuple[Manifest | None, int]:
    """Returns the usable manifest, and the highest generation, whatever its state."""
    # One listing for both: with two, a commit in between would make them speak of different generations.
    names = storage.list(prefix)
    try:
        manifest = _read_newest(storage, prefix, names)
    except DamagedError:
        # Its generation counts as taken: its replacement is committed above it.
        manifest = None
    return manifest, _highest(names)


def mark_damaged(storage: Storage, prefix: str, manifest: Manifest) -> None:
    """Marks an attempt as damaged, so that the bundle can be committed again."""
    # The mark names the attempt, so a late one does not hit a newer commit. A plain write is enough: any number of
    # readers who find the same damage leave the same empty mark.
    storage.write(f"{prefix}/{DAMAGED}{manifest.folder}", b"")


def manifest_name(generation: int) -> str:
    """Returns the name of a generation's manifest."""
    return "manifest.json" if generation == 1 else f"manifest-{generation}.json"


def _read_newest(storage: Storage, prefix: str, names: Sequence[str]) -> Manifest | None:
    generation = _highest(names)
    if generation == 0:
        return None
    path = f"{prefix}/{manifest_name(generation)}"
    try:
        manifest = parsed(storage.read(path), storage.uri(path))
    except FileNotFoundError:  # retention took it between the listing and this
        return None
    # Before the mark of damage: a bundle that retention is removing is absent, and no error.
    if REMOVED + manifest.folder in names:
        return None
    if DAMAGED + manifest.folder in names:
        raise RewritableDamageError(
            f"{storage.uri(prefix)} was found damaged before.", remedy="Run again: it will be rebuilt."
        )
    return manifest


def _highest(names: Sequence[str]) -> int:
    return max((int(match[1] or 1) for name in names if (match := _GENERATION.match(name))), default=0)


def parsed(data: bytes, where: str) -> Manifest:
    """Reads a manifest; DamagedError if it is none or names files outside its folder, FormatError if it is newer."""
    try:
        document = load(data)
        version = document["version"]
        # No damage: a damaged bundle is passed over, and written again.
        if isinstance(version, int) and version > VERSION:
            raise FormatError(
                f"{where} is a manifest of version {version}, and this Baton reads version {VERSION}.",
                remedy="Use the Baton that wrote it, or a newer one.",
            )
        if version != VERSION:
            raise ValueError(f"version {version!r}")
        manifest = Manifest(**document)
        check_files(manifest.files)
        if not _is_safe(manifest.folder) or not isinstance(manifest.meta, dict):
            raise ValueError(f"folder {manifest.folder!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{where} is not a manifest of version {VERSION}: {error}.") from None
    return manifest


def check_files(files: Mapping[str, FileEntry]) -> None:
    """Checks entries of files from a store; a bad one is a ValueError, TypeError or KeyError."""
    for name, entry in files.items():
        is_size = type(entry["size"]) is int and 0 <= entry["size"] <= MOST_BYTES
        if not (_is_safe(name) and is_size and _SHA256.fullmatch(entry["sha256"])):
            raise ValueError(f"file entry {name!r} is not a relative name with size and sha256")
        if not files.keys().isdisjoint(map(str, PurePosixPath(name).parents)):
            raise ValueError(f"file entry {name!r} is inside another file")


def _is_safe(name: object) -> bool:
    """Tells whether a name is relative, and stays inside the folder that it is joined to."""
    if not isinstance(name, str) or "\\" in name or "\0" in name:
        return False
    parts = name.split("/")
    # Nor is it a name that no file system takes: a part that is too long, or half a character.
    is_short = all(len(part.encode("utf-8", "surrogatepass")) <= LONGEST_NAME for part in parts)
    return is_short and not {"", ".", ".."}.intersection(parts) and not _SURROGATE.search(name)
