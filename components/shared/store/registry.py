"""Which client a store's address is for."""

from __future__ import annotations

from collections.abc import Callable

from baton.components.shared.store.azure import Azure
from baton.components.shared.store.cloud import CloudStore
from baton.components.shared.store.file_system import FileSystem
from baton.components.shared.store.folder import Folder
from baton.components.shared.store.gcs import Google
from baton.components.shared.store.object_store import ObjectStore
from baton.components.shared.store.s3 import S3

CLOUDS: tuple[type[CloudStore], ...] = (S3, Google, Azure)

STORES: dict[str, Callable[[str], ObjectStore]] = {
    "": Folder,
    "file": Folder,
    **{scheme: cloud for cloud in CLOUDS for scheme in cloud.schemes},
}
"""Client by scheme; every other scheme is fsspec's."""

ENVIRONMENT = tuple(beginning for cloud in CLOUDS for beginning in cloud.environment)
"""Beginnings of the names of variables with a store's endpoint and credentials."""


def environment_of(uri: str) -> tuple[str, ...]:
    """Returns the beginnings of the names of variables that hold a store's credentials; none for a folder."""
    scheme = uri.partition("://")[0]
    return next((cloud.environment for cloud in CLOUDS if scheme in cloud.schemes), ())


def open_store(uri: str) -> ObjectStore:
    """Returns the client for an address; nothing is asked of the store yet.

    Raises:
        StoreError: the scheme is unknown, or the address is none of its kind.
    """
    scheme, separator, _ = uri.partition("://")
    return STORES.get(scheme if separator else "", FileSystem)(uri)
