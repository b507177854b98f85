"""A store as a page that lives reads it: one listing of a run's folder a round, and only objects that have changed."""

import threading
from dataclasses import dataclass
from datetime import datetime

from baton.runs.documents import RunInfo
from baton.runs.outcomes import SweepHead
from baton.store.protocol import OWN, ObjectInfo
from baton.store.storage import Storage

HEADS = (RunInfo.NAME, SweepHead.NAME)
FOLDERS = ("runs", "sweeps")  # of folders that are listed whole; all else is read as ever
# A store's clock may tell whole seconds: a second write of the same size within one is seen by another read.
SETTLED_S = 2.0


@dataclass
class _Listing:
    number: int = -1  # of the round in which it was made
    objects: dict[str, ObjectInfo] | None = None
    changed: float = 0.0  # when a listing last differed from its predecessor


@dataclass(frozen=True)
class _Content:
    info: ObjectInfo
    data: bytes
    is_settled: bool


class ListedStorage(Storage):
    """Reads `runs/<name>` and `sweeps/<name>` by one listing each a round; writes go through.

    `requests` counts the requests to the store.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.requests = 0
        self._number = 0
        self._listings: dict[str, _Listing] = {}
        self._contents: dict[str, _Content] = {}
        self._counting = threading.Lock()

    def begin_round(self) -> None:
        """Has each folder listed again at its next use."""
        self._number += 1

    def keep(self, folder: str) -> None:
        """Uses the last listing of a folder for this round, too."""
        if (listing := self._listings.get(folder)) and listing.objects is not None:
            listing.number = self._number

    def modified(self) -> datetime | None:
        """Returns when the newest object of all listed folders was written, by the store's clock."""
        listings = [listing.objects or {} for listing in self._listings.values()]
        return max((info.modified for objects in listings for info in objects.values()), default=None)

    def changed(self, folder: str) -> float:
        """Returns when a folder was last seen to change, on this machine's monotonic clock."""
        self._listed(folder)
        return self._listings[folder].changed

    def read(self, path: str) -> bytes:
        folder, name = self._split(path)
        if folder is None:
            self._count()
            return super().read(path)
        listed = self._listed(folder)
        if not listed and name in HEADS:  # gone, or a folder that may not be read: the read itself tells which
            self._count()
            return super().read(path)
        info = listed.get(name)
        if info is None:
            raise FileNotFoundError(self.uri(path))
        known = self._contents.get(path)
        if known and known.info == info and known.is_settled:
            return known.data
        self._count()
        data = super().read(path)
        is_settled = self.runtime.monotonic() - self._listings[folder].changed > SETTLED_S
        self._contents[path] = _Content(info, data, is_settled)
        return data

    def list(self, path: str) -> list[str]:
        folder, name = self._split(path)
        if folder is None:
            self._count()
            return super().list(path)
        below = f"{name}/" if name else ""
        names = {each[len(below) :].partition("/")[0] for each in self._listed(folder) if each.startswith(below)}
        return sorted(each for each in names if not each.startswith(OWN))

    def size(self, path: str) -> int | None:
        folder, name = self._split(path)
        if folder is None:
            self._count()
            return super().size(path)
        info = self._listed(folder).get(name)
        return info.size if info else None

    def find(self, path: str) -> dict[str, ObjectInfo]:
        folder, name = self._split(path)
        if folder is None:
            self._count()
            return super().find(path)
        below = f"{name}/" if name else ""
        return {each[len(below) :]: info for each, info in self._listed(folder).items() if each.startswith(below)}

    def _split(self, path: str) -> tuple[str | None, str]:
        kind, _, rest = path.partition("/")
        name, _, below = rest.partition("/")
        return (f"{kind}/{name}", below) if kind in FOLDERS and name else (None, path)

    def _listed(self, folder: str) -> dict[str, ObjectInfo]:
        listing = self._listings.setdefault(folder, _Listing())
        if listing.number != self._number:
            self._count()
            found = super().find(folder)
            if found != listing.objects:
                gone = (listing.objects or {}).keys() - found.keys()
                for name in gone:
                    self._contents.pop(f"{folder}/{name}", None)
                listing.objects, listing.changed = found, self.runtime.monotonic()
            listing.number = self._number
        assert listing.objects is not None
        return listing.objects

    def _count(self) -> None:
        with self._counting:
            self.requests += 1
