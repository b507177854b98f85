"""JSON documents of one thing in the store, a run or a sweep, below a folder of its own."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self

from components.shared.errors import UserError
from components.shared.store.storage import Storage


class Documents:
    """The documents of one thing, addressed by the store and its name.

    Args:
        storage: The store.
        name: The thing's name.
    """

    KIND: ClassVar[str]
    """What it is; the folder of all of its kind has this name in the plural."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name

    @classmethod
    def open(cls, uri: str) -> Self:
        """Opens one by its address, such as `<store>/runs/<name>`.

        Raises:
            UserError: the address is not of that form.
        """
        store, separator, name = uri.rstrip("/").rpartition(f"/{cls.KIND}s/")
        if not separator or not name or "/" in name:
            raise UserError(f"{cls.KIND} URI {uri!r} is not of the form STORE/{cls.KIND}s/NAME.")
        return cls(Storage(store), name)

    def path(self, name: str = "") -> str:
        """Returns a path below its folder in the store."""
        return f"{self.KIND}s/{self.name}/{name}".rstrip("/")

    @property
    def uri(self) -> str:
        """Its address."""
        return self.storage.uri(self.path())

    def put(self, name: str, document: dict[str, Any]) -> None:
        """Writes a document, replacing the one before."""
        self.storage.write(self.path(name), as_json(document))

    def put_new(self, name: str, document: dict[str, Any]) -> bool:
        """Writes a document where there is none, and tells whether this call did; the first one stands."""
        return self.storage.create(self.path(name), as_json(document))

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns a document, or None."""
        try:
            document: dict[str, Any] = json.loads(self.storage.read(self.path(name)))
        except FileNotFoundError:
            return None
        return document

    def require(self, name: str) -> dict[str, Any]:
        """Returns a document.

        Raises:
            UserError: it is not there.
        """
        document = self.get(name)
        if document is None:
            uri = self.storage.uri(self.path(name))
            raise UserError(f"{uri} does not exist.", remedy=f"Check store and {self.KIND} name.")
        return document


def as_json(document: dict[str, Any]) -> bytes:
    """Returns a document as it is written: the same for the same content."""
    return json.dumps(document, indent=1, sort_keys=True).encode()
