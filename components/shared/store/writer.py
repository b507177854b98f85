"""Writes a bundle: its files first, below a name that no other process has, then the manifest.

What an earlier bundle has already is copied inside the store: see `store.ancestors`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence

from baton.components.shared.core.errors import StoreError, UnavailableError
from baton.components.shared.store.ancestors import Ancestors, Source
from baton.components.shared.store.manifests import (
    REMOVED,
    FileEntry,
    Manifest,
    manifest_name,
    newest_usable,
)
from baton.components.shared.store.object_store import BLOCK
from baton.components.shared.store.storage import Storage

logger = logging.getLogger("baton")

_ATTEMPT = re.compile("[0-9a-f]{12}")
ROUNDS = 5
"""Times a commit looks again after another writer's manifest came in its way and was gone."""


class BundleWriter:
    """One writer's attempt at a bundle: files first, then the manifest.

    Args:
        storage: Where to.
        prefix: Path of the bundle in the store.
        kind: What the files are.
        check: Called every few megabytes; what it raises ends the attempt.
        look: Returns the bundles that unchanged files may be copied from; called once, before the first is sent.

    Attributes:
        folder: Name of the attempt, which no other process has.
        files: Size and SHA-256 of what is uploaded, by relative name.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        kind: str,
        check: Callable[[], None] = lambda: None,
        look: Callable[[], Ancestors] = Ancestors,
    ) -> None:
        self.storage = storage
        self.prefix = prefix
        self.kind = kind
        self.folder = storage.world.unique()[:12]
        self.files: dict[str, FileEntry] = {}
        self._check = check
        self._look = look
        self._ancestors: Ancestors | None = None

    def send(self, local_dir: str) -> None:
        """Uploads the files of a folder, at any depth, or copies them; those sent before are not sent again."""
        if self._ancestors is None:
            self._ancestors = self._look()
        names = {
            os.path.relpath(os.path.join(parent, name), local_dir).replace(os.sep, "/")
            for parent, _, names in os.walk(local_dir)
            for name in names
        }
        local = {name: os.path.join(local_dir, name) for name in sorted(names - self.files.keys())}
        sources = {name: self._ancestors.sources(name, os.path.getsize(path)) for name, path in local.items()}

        def upload(name: str) -> None:
            # Noted only once all of the file is up: another `send`, after an error, then sends what is still missing.
            digest = self.storage.upload(local[name], self._path(name), self._check)
            self.files[name] = {"size": os.path.getsize(local[name]), "sha256": digest}

        def copy(name: str) -> None:
            if not self._copied(name, local[name], sources[name]):
                upload(name)

        # What changes goes first: a hard link has its source's age, by which retention would take an upload that has
        # nothing else yet for one that was abandoned.
        self.storage.world.each(upload, [name for name in local if not sources[name]])
        self.storage.world.each(copy, [name for name in local if sources[name]])

    def _copied(self, name: str, local_path: str, sources: Sequence[Source]) -> bool:
        """Copies an unchanged file inside the store, and tells whether it did; else it is to be sent."""
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
            except StoreError as error:  # refused, or it takes longer than a request may
                logger.info("%s is sent, not copied: %s", name, error.message)
                return False
        return False

    def _path(self, name: str) -> str:
        return f"{self.prefix}/{self.folder}/{name}"

    def manifest(self, meta: Mapping[str, object]) -> Manifest:
        """Returns what `commit` would write."""
        return Manifest(kind=self.kind, folder=self.folder, files=dict(sorted(self.files.items())), meta=dict(meta))

    def commit(self, meta: Mapping[str, object]) -> tuple[Manifest, bool]:
        """Writes the manifest, unless another writer was first.

        Returns:
            The manifest that is committed now, and whether it is this attempt's.

        Raises:
            UnavailableError: other writers come and go, and none of their manifests stays.
        """
        manifest = self.manifest(meta)
        data = manifest.as_written().encode()
        for attempt in range(ROUNDS):
            # Looks before it writes: a generation is made only above one that is damaged or gone, so that two writers
            # never commit side by side. Who loses the put of the same generation looks again and finds the winner's.
            committed, generation = newest_usable(self.storage, self.prefix)
            if committed is not None:  # this attempt's where the answer to its put was lost
                return committed, committed.folder == self.folder
            if attempt and self._was_removed():
                return manifest, True
            if self.storage.create(f"{self.prefix}/{manifest_name(generation + 1)}", data):
                return manifest, True
        raise UnavailableError(f"{self.storage.uri(self.prefix)} could not be committed in {ROUNDS} rounds.")

    def _was_removed(self) -> bool:
        """Tells whether retention takes this attempt, or has: a put had an effect whose answer was lost."""
        # In this order: the mark is there until the last file is gone.
        if f"{REMOVED}{self.folder}" in self.storage.list(self.prefix):
            return True
        first = next(iter(self.files), None)
        return first is not None and self.storage.size(f"{self.prefix}/{self.folder}/{first}") is None


def publish(
    storage: Storage, prefix: str, local_dir: str, *, kind: str, meta: Mapping[str, object]
) -> tuple[Manifest, bool]:
    """Uploads a folder and commits it.

    Args:
        storage: Where to.
        prefix: Path of the bundle in the store.
        local_dir: Folder whose files, at any depth, are the bundle.
        kind: What the files are.
        meta: Goes into the manifest; plain JSON values.

    Returns:
        The manifest that is committed now, and whether it is this call's: False when another writer was first.
    """
    writer = BundleWriter(storage, prefix, kind=kind)
    writer.send(local_dir)
    return writer.commit(meta)


def clear_others(storage: Storage, prefix: str, manifest: Manifest) -> None:
    """Removes what other writers left below a prefix that is committed: killed uploads, lost races, what was damaged.

    The marks stay: a writer may only have slept, and commit after all where the bundle is found damaged meanwhile. Then
    nobody reads what it commits.
    """
    others: dict[str, list[str]] = {}
    for name in storage.find(prefix):
        attempt, _, rest = name.partition("/")
        if rest and _ATTEMPT.fullmatch(attempt) and attempt != manifest.folder:
            others.setdefault(attempt, []).append(f"{prefix}/{name}")
    for attempt, paths in others.items():
        storage.write(f"{prefix}/{REMOVED}{attempt}", b"")
        storage.world.each(storage.remove, paths)
        storage.tidy(f"{prefix}/{attempt}")


def file_sha256(local_path: str, check: Callable[[], None] = lambda: None) -> str:
    """Returns the SHA-256 of a local file; what `check` raises, called every few megabytes, ends it."""
    digest = hashlib.sha256()
    with open(local_path, "rb") as file:
        while block := file.read(BLOCK):
            check()
            digest.update(block)
    return digest.hexdigest()
