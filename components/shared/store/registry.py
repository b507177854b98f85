"""Which client a store's address is for."""

from __future__ import annotations

from collections.abc import Callable

from components.shared.store.file_system import FileSystem
from components.shared.store.folder import Folder
from components.shared.store.object_store import ObjectStore
from components.shared.store.s3 import S3

STORES: dict[str, Callable[[str], ObjectStore]] = {"": Folder, "file": Folder, "s3": S3, "s3a": S3}
"""Client by scheme; every other scheme is fsspec's."""


def open_store(uri: str) -> ObjectStore:
    """Returns the client for an address; nothing is asked of the store yet.

    Raises:
        StoreError: the scheme is unknown, or the address is none of its kind.
    """
    scheme, separator, _ = uri.partition("://")
    return STORES.get(scheme if separator else "", FileSystem)(uri)
