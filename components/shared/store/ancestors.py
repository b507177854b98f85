"""What need not be sent again: files that an earlier bundle has, unchanged, and that are copied inside the store.

A copy may share its bytes with its source, as a hard link does: what damages one damages the other. So two bundles that
follow each other never have a file of the same origin. What did not change comes from the one before the last, and
there are always two sets of it that know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.components.shared.store.manifests import FileEntry, Manifest

DEPTH = 3
"""Bundles that are looked at: the last one, and two that may be copied from."""


@dataclass(frozen=True)
class Source:
    """An object that is as a file was when its bundle was committed.

    Attributes:
        path: Where it lies.
        sha256: Of its bytes.
        origin: The attempt that sent them.
    """

    path: str
    sha256: str
    origin: str


@dataclass(frozen=True)
class Ancestors:
    """Bundles that were committed before the one that is being written.

    Attributes:
        bundles: Prefix and manifest of each, newest first; none older than one that was found damaged, whose bytes they
            may share.
    """

    bundles: Sequence[tuple[str, Manifest]] = ()

    def sources(self, name: str, size: int) -> list[Source]:
        """Returns what a file may be a copy of, newest first, if its SHA-256 is theirs; see `Source`.

        Args:
            name: The file's relative name.
            size: Its bytes.
        """
        if not self.bundles:
            return []
        last = self.bundles[0][1]
        entry = last.files.get(name)
        if entry is None or entry["size"] != size:
            return []
        # The same in two bundles: of what changes each time, such as the optimizer's state, no hash is taken for this.
        return [
            Source(manifest.path(prefix, name), entry["sha256"], origin(manifest, name))
            for prefix, manifest in self.bundles[1:]
            if _is_same(manifest.files.get(name), entry) and origin(manifest, name) != origin(last, name)
        ]


def origin(manifest: Manifest, name: str) -> str:
    """Returns the attempt that sent the bytes of a bundle's file."""
    return manifest.files[name].get("origin", manifest.folder)


def shares(ours: Manifest, theirs: Manifest) -> bool:
    """Tells whether a file of two bundles may have the same bytes in the store, so that damage is of both."""
    return any(origin(ours, name) == origin(theirs, name) for name in ours.files.keys() & theirs.files.keys())


def _is_same(ours: FileEntry | None, theirs: FileEntry) -> bool:
    return ours is not None and (ours["size"], ours["sha256"]) == (theirs["size"], theirs["sha256"])
