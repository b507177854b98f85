"""Bundles: folders of files committed to the store as one, by a manifest written last.

    <prefix>/<attempt>/{files…}      what one writer uploaded
    <prefix>/manifest….json          what makes them a bundle: see `baton.store.manifest`

Every writer uploads below its own name, so that a late one cannot touch the files of another. Files of a writer that
dies before its manifest are never read. Retention removes a checkpoint's once they are old, the next export an
export's.

Unchanged files of an earlier bundle are copied inside the store. A copy may share its bytes with its source, as a hard
link does. So copies are taken from the last bundle but one, and damage never hits two bundles in a row.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton import events
from baton.errors import RewritableDamageError, StoreError, UnavailableError
from baton.store.cache import NodeCache
from baton.store.manifest import (
    REMOVED,
    FileEntry,
    Manifest,
    manifest_name,
    mark_damaged,
    newest_usable,
    usable_manifest,
)
from baton.store.protocol import BLOCK, ObjectInfo
from baton.store.storage import Storage

logger = logging.getLogger("baton")
_ATTEMPT = re.compile("[0-9a-f]{12}")
ROUNDS = 5  # rounds of a commit, each lost to another writer's manifest that was gone when it was looked for
MAX_COPY_DEPTH = 3  # the last bundle, and two to copy from


@dataclass(frozen=True)
class CopySource:
    path: str
    sha256: str
    origin: str  # attempt that sent its bytes


@dataclass(frozen=True)
class CopySources:
    # Prefix and manifest of earlier bundles, newest first; none older than a damaged one, whose bytes it may share.
    bundles: Sequence[tuple[str, Manifest]] = ()

    def sources(self, name: str, size: int) -> list[CopySource]:
        """Returns objects that a file may be a copy of, newest first, if it has their SHA-256."""
        if not self.bundles:
            return []
        last = self.bundles[0][1]
        entry = last.files.get(name)
        if entry is None or entry["size"] != size:
            return []
        # The same in two bundles: files that always change, such as the optimizer's state, are not hashed for this.
        return [
            CopySource(manifest.path(prefix, name), entry["sha256"], origin(manifest, name))
            for prefix, manifest in self.bundles[1:]
            if name in manifest.files
            and (manifest.files[name]["size"], manifest.files[name]["sha256"]) == (size, entry["sha256"])
            and origin(manifest, name) != origin(last, name)
        ]


def origin(manifest: Manifest, name: str) -> str:
    """Returns the attempt that sent the bytes of a bundle's file."""
    return manifest.files[name].get("origin", manifest.folder)


def may_share_bytes(ours: Manifest, theirs: Manifest) -> bool:
    """Tells whether two bundles may share bytes in the store, so that damage hits both."""
    return any(origin(ours, name) == origin(theirs, name) for name in ours.files.keys() & theirs.files.keys())


class BundleWriter:
    """One writer's attempt at a bundle: files first, then the manifest.

    `check` is called every few megabytes; its error ends the attempt. `find_copy_sources` is called once, before the
    first file. `fits` tells whether a committed manifest belongs to this place. `folder` is the attempt's name, unique
    among processes; `files` holds the uploads by relative name.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        kind: str,
        check: Callable[[], None] = lambda: None,
        find_copy_sources: Callable[[], CopySources] = CopySources,
        fits: Callable[[Manifest], bool] = lambda manifest: True,
    ) -> None:
        self.storage = storage
        self.prefix = prefix
        self.kind = kind
        self.folder = storage.runtime.unique()[:12]
        self.files: dict[str, FileEntry] = {}
        self._check = check
        self._find_copy_sources = find_copy_sources
        self._fits = fits
        self._copy_sources: CopySources | None = None

    def send(self, local_dir: str) -> None:
        """Uploads or copies the files of a folder, at any depth, except those sent before."""
        if self._copy_sources is None:
            self._copy_sources = self._find_copy_sources()
        names = {
            os.path.relpath(os.path.join(parent, name), local_dir).replace(os.sep, "/")
            for parent, _, names in os.walk(local_dir)
            for name in names
        }
        local = {name: os.path.join(local_dir, name) for name in sorted(names - self.files.keys())}
        sources = {name: self._copy_sources.sources(name, os.path.getsize(path)) for name, path in local.items()}

        def upload(name: str) -> None:
            # Noted only once all of the file is up: another `send`, after an error, then sends the missing ones.
            digest = self.storage.upload(local[name], self._path(name), self._check)
            self.files[name] = {"size": os.path.getsize(local[name]), "sha256": digest}

        def copy(name: str) -> None:
            if not self._copied(name, local[name], sources[name]):
                upload(name)

        # Changed files first: a hard link has its source's age, by which retention would take an upload of links alone
        # for an abandoned one.
        self.storage.runtime.each(upload, [name for name in local if not sources[name]])
        self.storage.runtime.each(copy, [name for name in local if sources[name]])

    def _copied(self, name: str, local_path: str, sources: Sequence[CopySource]) -> bool:
        """Copies an unchanged file inside the store, and tells whether it did."""
        size, digest = os.path.getsize(local_path), file_sha256(local_path, self._check)
        for source in sources:
            if source.sha256 != digest:
                continue
            self._check()
            try:
                if self.storage.copy(source.path, self._path(name), size):
                    self.files[name] = {"size": size, "sha256": digest, "origin": source.origin}
                    return True
            except FileNotFoundError:  # retention took it meanwhile
                continue
            except StoreError as error:  # refused, or longer than a request may take
                logger.info("%s is sent, not copied: %s", name, error.message)
                return False
        return False

    def _path(self, name: str) -> str:
        return f"{self.prefix}/{self.folder}/{name}"

    def manifest(self, meta: Mapping[str, object]) -> Manifest:
        return Manifest(kind=self.kind, folder=self.folder, files=dict(sorted(self.files.items())), meta=dict(meta))

    def commit(self, meta: Mapping[str, object]) -> tuple[Manifest, bool]:
        """Writes the manifest, unless another writer was first; returns the committed one and whether it is ours."""
        manifest = self.manifest(meta)
        data = manifest.as_written().encode()
        for attempt in range(ROUNDS):
            # Look before the write: a generation is made only above a damaged or removed one, so that two writers never
            # commit side by side. The loser of a put of the same generation looks again and finds the winner's.
            committed, generation = newest_usable(self.storage, self.prefix)
            if committed is not None and self._fits(committed):  # ours, where the answer to our put was lost
                return committed, committed.folder == self.folder
            if attempt and self._was_removed():
                return manifest, True
            if self.storage.create(f"{self.prefix}/{manifest_name(generation + 1)}", data):
                return manifest, True
        raise UnavailableError(f"{self.storage.uri(self.prefix)} could not be committed in {ROUNDS} rounds.")

    def _was_removed(self) -> bool:
        """Tells whether retention removes or has removed this attempt: it was committed, and the put's answer lost."""
        # In this order: the mark is there until the last file is gone.
        if f"{REMOVED}{self.folder}" in self.storage.list(self.prefix):
            return True
        first = next(iter(self.files), None)
        return first is not None and self.storage.size(f"{self.prefix}/{self.folder}/{first}") is None


def publish(
    storage: Storage, prefix: str, local_dir: str, *, kind: str, meta: Mapping[str, object]
) -> tuple[Manifest, bool]:
    """Uploads a folder and commits it; returns as `BundleWriter.commit` does."""
    writer = BundleWriter(storage, prefix, kind=kind)
    writer.send(local_dir)
    return writer.commit(meta)


def clear_others(storage: Storage, prefix: str, manifest: Manifest) -> None:
    """Removes other writers' files below a committed prefix: killed uploads, lost races, damaged attempts."""
    others: dict[str, list[str]] = {}
    for name in storage.find(prefix):
        attempt, _, rest = name.partition("/")
        if rest and _ATTEMPT.fullmatch(attempt) and attempt != manifest.folder:
            others.setdefault(attempt, []).append(f"{prefix}/{name}")
    for attempt, paths in others.items():
        # The mark comes first and stays: a writer may only have slept, and commit after all once the bundle is found
        # damaged. Readers then pass its manifest over.
        storage.write(f"{prefix}/{REMOVED}{attempt}", b"")
        storage.runtime.each(storage.remove, paths)
        storage.tidy(f"{prefix}/{attempt}")


def file_sha256(local_path: str, check: Callable[[], None] = lambda: None) -> str:
    """Returns the SHA-256 of a local file; what `check` raises, called every few megabytes, ends it."""
    digest = hashlib.sha256()
    with open(local_path, "rb") as file:
        while block := file.read(BLOCK):
            check()
            digest.update(block)
    return digest.hexdigest()


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
    """Downloads a bundle, or some of its files, checking every byte; returns the folder that has them.

    With `in_place`, files of a folder store are read there and not copied. DamagedError, and a mark, for a bad file.
    """
    in_place = in_place and storage.is_local
    target = storage.key(manifest.path(prefix)) if in_place else local_dir
    present = storage.find(manifest.path(prefix))

    def receive(name: str) -> str | None:
        if in_place:  # the bytes are hashed all the same
            return _problem(storage, prefix, manifest, name, present, None)
        local_path, digest = os.path.join(target, name), manifest.files[name]["sha256"]
        if cache and cache.take(digest, local_path):
            return None
        problem = _problem(storage, prefix, manifest, name, present, local_path)
        # Only with the committed hash: a bad file would be handed to every pod of this node.
        if cache and problem is None:
            cache.keep(digest, local_path)
        return problem

    wanted = manifest.files if names is None else names
    require_whole(storage, prefix, manifest, [line for line in storage.runtime.each(receive, sorted(wanted)) if line])
    return target


def verify(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Reads every file of a bundle back and returns a line for each that differs from the committed one."""
    present = storage.find(manifest.path(prefix))
    lines = storage.runtime.each(
        lambda name: _problem(storage, prefix, manifest, name, present, None), sorted(manifest.files)
    )
    return [line for line in lines if line]


def undamaged(storage: Storage, prefix: str, most_bytes: int | None = None) -> Manifest | None:
    """Returns the manifest of a bundle that its stage need not commit again, else None; marks a damaged one.

    All bytes are read back, of a bundle above `most_bytes` only sizes.
    """
    manifest = usable_manifest(storage, prefix)
    if manifest is None:
        return None
    is_read = most_bytes is None or manifest.bytes <= most_bytes
    problems = verify(storage, prefix, manifest) if is_read else torn_files(storage, prefix, manifest)
    if not problems:
        return manifest
    mark_damaged(storage, prefix, manifest)
    events.warn(f"{storage.uri(prefix)} is damaged and made again: {'; '.join(problems)}")
    return None


def is_whole(storage: Storage, prefix: str, manifest: Manifest) -> bool:
    """Tells whether all files of a bundle are there in full size, by one listing where they are."""
    return not torn_files(storage, prefix, manifest)


def torn_files(storage: Storage, prefix: str, manifest: Manifest) -> list[str]:
    """Returns a line for each file of a bundle that is missing or not of its size: one listing where none is."""
    present = storage.find(manifest.path(prefix))
    lines = []
    for name, entry in manifest.files.items():
        # A listing may lag behind: a file that it lacks is asked for before it counts as missing.
        size = present[name].size if name in present else storage.size(manifest.path(prefix, name))
        if size is None:
            lines.append(f"{name}: missing")
        elif size != entry["size"]:
            lines.append(f"{name}: {size} bytes, committed were {entry['size']}")
    return lines


def require_whole(storage: Storage, prefix: str, manifest: Manifest, problems: list[str]) -> None:
    """Marks a bundle with problems, and raises a RewritableDamageError."""
    if problems:
        # Retention may remove files under a reader's hands: that is no damage, and a mark would outlive it.
        if usable_manifest(storage, prefix) != manifest:
            raise RewritableDamageError(
                f"{storage.uri(prefix)} was removed or replaced while it was read.", remedy="Run again."
            )
        mark_damaged(storage, prefix, manifest)
        raise RewritableDamageError(
            f"{storage.uri(prefix)} is damaged: {'; '.join(problems)}.", remedy="Run again: it will be rebuilt."
        )


def _problem(
    storage: Storage,
    prefix: str,
    manifest: Manifest,
    name: str,
    present: Mapping[str, ObjectInfo],
    local_path: str | None,
) -> str | None:
    """Reads a file, to a local path or to nowhere, and returns its fault."""
    expected, path = manifest.files[name], manifest.path(prefix, name)
    size = present[name].size if name in present else None
    # The listing tells a wrong size before a byte is read. A file that it lacks is asked for: the request decides.
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
