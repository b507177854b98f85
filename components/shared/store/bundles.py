"""Bundles: folders of files committed to the store as one, by a manifest written last.

    <prefix>/<attempt>/{files…}      what one writer uploaded
    <prefix>/manifest….json          what makes them a bundle: see `store.manifests`

Every writer uploads below its own name, so that one who finishes late cannot touch the files of the one whose
manifest was first. Readers see a prefix only once it has a manifest: a writer that dies at any moment before leaves
files that nobody reads: retention takes those of checkpoints when they are old, the next export those of exports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from baton.components.shared.core.errors import MarkedError
from baton.components.shared.core.world import REAL
from baton.components.shared.store.cache import NodeCache
from baton.components.shared.store.manifests import (
    DAMAGED,
    REMOVED,
    FileEntry,
    Manifest,
    mark_damaged,
    read_manifest,
    usable_manifest,
)
from baton.components.shared.store.object_store import Entry
from baton.components.shared.store.storage import Storage
from baton.components.shared.store.writer import BundleWriter, clear_others, file_sha256, publish

__all__ = [
    "DAMAGED",
    "REMOVED",
    "BundleWriter",
    "FileEntry",
    "Manifest",
    "clear_others",
    "each",
    "fetch",
    "file_sha256",
    "is_whole",
    "mark_damaged",
    "publish",
    "read_manifest",
    "require_whole",
    "torn_files",
    "usable_manifest",
    "verify",
]

T = TypeVar("T")
R = TypeVar("R")


def fetch(
    storage: Storage,
    prefix: str,
    manifest: Manifest,
    local_dir: str,
    cache: NodeCache | None = None,
    names: Iterable[str] | None = None,
    *,
    in_place: bool = True,
) -> str:
    """Downloads a bundle to this machine, checking every byte.

    Args:
        storage: Where from.
        prefix: Path of the bundle in the store.
        manifest: What is committed there.
        local_dir: Folder for the files, unless the store is one itself: then they are read in place.
        cache: Files this node has already, by their hashes.
        names: The files that are wanted; all of them when None.
        in_place: False where the files are to be in `local_dir` whatever the store is.

    Returns:
        The folder with the files.

    Raises:
        DamagedError: a file is missing or its SHA-256 differs; the bundle is marked.
    """
    in_place = in_place and storage.is_local
    target = storage.key(manifest.path(prefix)) if in_place else local_dir
    present = storage.find(manifest.path(prefix))

    def receive(name: str) -> str | None:
        # Read in place: nothing is copied, and the bytes are hashed all the same.
        if in_place:
            return _problem(storage, prefix, manifest, name, present, None)
        local_path, digest = os.path.join(target, name), manifest.files[name]["sha256"]
        if cache and cache.take(digest, local_path):
            return None
        problem = _problem(storage, prefix, manifest, name, present, local_path)
        # Only what has the committed hash: a bad file here would be handed to every pod of this node.
        if cache and problem is None:
            cache.keep(digest, local_path)
        return problem

    wanted = manifest.files if names is None else names
    require_whole(storage, prefix, manifest, [line for line in storage.world.each(receive, sorted(wanted)) if line])
    return target


def verify(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Reads every file of a bundle back and returns a line for each that is not what was committed."""
    present = storage.find(manifest.path(prefix))
    lines = storage.world.each(
        lambda name: _problem(storage, prefix, manifest, name, present, None), sorted(manifest.files)
    )
    return [line for line in lines if line]


def is_whole(storage: Storage, prefix: str, manifest: Manifest) -> bool:
    """Tells whether all files of a bundle are there in full size, which costs one listing where they are."""
    return not torn_files(storage, prefix, manifest)


def torn_files(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Returns a line for each file of a bundle that is missing or not of its size: one listing where none is."""
    present = storage.find(manifest.path(prefix))
    lines = []
    for name, entry in manifest.files.items():
        # A listing may lag behind: what it lacks is asked for, before anybody calls it damage.
        size = present[name].size if name in present else storage.size(manifest.path(prefix, name))
        if size is None:
            lines.append(f"{name}: missing")
        elif size != entry["size"]:
            lines.append(f"{name}: {size} bytes, committed were {entry['size']}")
    return lines


def require_whole(storage: Storage, prefix: str, manifest: Manifest, problems: list[str]) -> None:
    """Marks a bundle in which problems were found.

    Raises:
        MarkedError: there are any.
    """
    if problems:
        # Retention takes files under a reader's hands: what it takes is not damaged, and a mark would outlive it.
        if usable_manifest(storage, prefix) != manifest:
            raise MarkedError(f"{storage.uri(prefix)} was removed or replaced while it was read.", remedy="Run again.")
        mark_damaged(storage, prefix, manifest)
        raise MarkedError(
            f"{storage.uri(prefix)} is damaged: {'; '.join(problems)}.", remedy="Run again: it will be made anew."
        )


def each(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Calls a function with each item, several at a time, and returns the results in the items' order."""
    return REAL.each(work, items)


def _problem(
    storage: Storage,
    prefix: str,
    manifest: Manifest,
    name: str,
    present: Mapping[str, Entry],
    local_path: str | None,
) -> str | None:
    """Reads a file, to a local path or to nowhere, and returns what is wrong with it."""
    expected, path = manifest.files[name], manifest.path(prefix, name)
    size = present[name].size if name in present else None
    # The listing tells a wrong size before a byte is read. What it lacks is asked for all the same: the request
    # decides.
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
