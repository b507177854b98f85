"""JSON documents of one thing in the store, a run or a sweep, below its own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from baton.components.shared.core.document import NamedDocument, load_object
from baton.components.shared.core.errors import UserError
from baton.components.shared.store.storage import Storage

D = TypeVar("D", bound=NamedDocument)
_TAKEN_BACK = b"null"
"""A document that would have been removed, had that been allowed."""


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
        store, separator, rest = uri.rstrip("/").rpartition(f"/{cls.KIND}s/")
        name, below, _ = rest.partition("/")
        if not separator or below or name in ("", ".", ".."):
            hint = f"Give the {cls.KIND} that it is part of: {store}{separator}{name}" if separator and below else None
            raise UserError(f"{cls.KIND} URI {uri!r} is not of the form STORE/{cls.KIND}s/NAME.", remedy=hint)
        return cls(Storage(store), name)

    def path(self, name: str = "") -> str:
        """Returns a path below its folder in the store."""
        return f"{self.KIND}s/{self.name}/{name}".rstrip("/")

    @property
    def uri(self) -> str:
        """Its address."""
        return self.storage.uri(self.path())

    def read(self, kind: type[D], *key: int | str) -> D | None:
        """Returns a document by its type, of several the one of a key; None where there is none.

        Raises:
            FormatError: a newer Baton wrote it.
            DamagedError: it is not such a document.
        """
        path = self.path(kind.file_name(*key))
        try:
            data = self.storage.read(path)
        except FileNotFoundError:
            return None
        return None if data == _TAKEN_BACK else kind.read(data, self.storage.uri(path))

    def remove(self, kind: type[NamedDocument]) -> None:
        """Removes a document, if it is there; in a store from which nothing may be removed it is written over."""
        path = self.path(kind.NAME)
        if not self.storage.remove(path) and self.storage.exists(path):
            self.storage.write(path, _TAKEN_BACK)

    def need(self, kind: type[D], *key: int | str) -> D:
        """Returns a document by its type.

        Raises:
            UserError: it is not there.
        """
        document = self.read(kind, *key)
        if document is None:
            uri = self.storage.uri(self.path(kind.file_name(*key)))
            raise UserError(f"{uri} does not exist.", remedy=f"Check store and {self.KIND} name.")
        return document

    def write(self, document: NamedDocument, *key: int | str) -> None:
        """Writes a document under its type's name, replacing the one before."""
        self.put(document.file_name(*key), document.to_json())

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a document, replacing the one before."""
        self.storage.write(self.path(name), as_json(document))

    def put_new(self, name: str, document: Mapping[str, Any]) -> bool:
        """Writes a document where there is none, and tells whether this call did; the first one stands."""
        return self.storage.create(self.path(name), as_json(document))

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns a document, or None.

        Raises:
            DamagedError: it is not a JSON object.
        """
        path = self.path(name)
        try:
            return load_object(self.storage.read(path), self.storage.uri(path))
        except FileNotFoundError:
            return None

    def require(self, name: str) -> dict[str, Any]:
        """Returns a document.

        Raises:
            UserError: it is not there.
            DamagedError: it is not a JSON object.
        """
        document = self.get(name)
        if document is None:
            uri = self.storage.uri(self.path(name))
            raise UserError(f"{uri} does not exist.", remedy=f"Check store and {self.KIND} name.")
        return document


def as_json(document: Mapping[str, Any]) -> bytes:
    """Returns a document as it is written: the same for the same content."""
    return json.dumps(document, indent=1, sort_keys=True).encode()
