"""The object store: a folder and S3 behave alike, and what passes by itself is tried again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from components.shared import lease
from components.shared.errors import BatonError, StoreError, UnavailableError
from components.shared.files import OWN, Files, Folder
from components.shared.s3 import S3
from components.shared.store_errors import explain, is_missing

logger = logging.getLogger("baton")

PATIENCE = "BATON_STORE_PATIENCE"
"""Environment variable: seconds for which an operation on a store that does not answer is tried again."""
LONGEST_PAUSE = 10.0
T = TypeVar("T")


class Storage:
    """Objects below one URI, named by paths relative to it.

    Args:
        uri: A folder, `file://…`, `s3://bucket[/prefix]` or any other fsspec URI. The endpoint and
            credentials come from the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …).
        patience: Seconds for which an operation is tried again while the store does not answer;
            10 when neither this nor `BATON_STORE_PATIENCE` says otherwise.

    Attributes:
        sent: Bytes of files uploaded by this process.
        received: Bytes of files downloaded by it.

    Raises:
        StoreError: the URI has an unknown protocol.
    """

    def __init__(self, uri: str, *, patience: float | None = None) -> None:
        self.patience = float(os.environ.get(PATIENCE, 10)) if patience is None else patience
        self._uri = uri
        self.sent = self.received = 0
        if uri.startswith(("s3://", "s3a://")):
            self.is_local = False
            self.root = uri.partition("://")[2].strip("/")
            self.base_uri = f"s3://{self.root}"
        else:
            self.root = _root(uri, self.fs)
            self.is_local = isinstance(self.fs, LocalFileSystem)
            self.base_uri = self.root if self.is_local else self.fs.unstrip_protocol(self.root)
        if not self.is_local and not self.root:
            raise StoreError(f"store {uri!r} names no bucket.", remedy="Use s3://bucket or s3://bucket/prefix.")

    @cached_property
    def fs(self) -> Any:
        """The fsspec file system, for those who read files that are not Baton's."""
        try:
            return fsspec.core.url_to_fs(self._uri, **_options(self._uri))[0]
        except (ValueError, TypeError, ImportError) as error:
            raise StoreError(
                f"store {self._uri!r} cannot be opened: {error}.", remedy="Use a folder or s3://bucket."
            ) from None

    @cached_property
    def client(self) -> S3 | Files:
        """What moves the bytes."""
        if self.base_uri.startswith("s3://"):
            return S3(self.base_uri)
        return Folder(self.fs) if self.is_local else Files(self.fs)

    def uri(self, path: str = "") -> str:
        """Returns the address of an object for people and for other processes."""
        return f"{self.base_uri}/{path}".rstrip("/")

    def key(self, path: str = "") -> str:
        """Returns the file system's own name of an object."""
        return f"{self.root}/{path}".rstrip("/")

    def read(self, path: str) -> bytes:
        """Returns a whole object.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: the store refused or could not be reached.
        """
        return self._patiently(lambda: self.client.read(self._object(path)))

    def write(self, path: str, data: bytes) -> None:
        """Writes a whole object, replacing what was there; readers see the old or the new one."""
        self._patiently(lambda: self.client.write(self._object(path), data))

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object only if there is none: put-if-absent.

        Returns:
            Whether this call created it. Among any number of writers at most one is told yes; none is
            where the answer to the put that won was lost on its way.
        """
        if self.has_conditional_put:
            return self._patiently(lambda: self.client.create(self._object(path), data))
        return self._patiently(lambda: lease.create(self.client, self._object(path), data))

    @cached_property
    def has_conditional_put(self) -> bool:
        """Whether the store refuses a put where there is an object: tried once, with an object made for it."""
        if self.is_local:
            return True
        path = self._object(f"{OWN}probe-{uuid.uuid4().hex}")

        def probe() -> bool:
            try:
                return self.client.create(path, b"1") and not self.client.create(path, b"2")
            finally:
                self.client.remove(path)

        try:
            return self._patiently(probe)
        except StoreError as error:
            if "501" in str(error) or "NotImplemented" in str(error):
                return False
            raise

    def exists(self, path: str) -> bool:
        """Tells whether there is an object of this name."""
        return self.size(path) is not None

    def size(self, path: str) -> int | None:
        """Returns an object's size in bytes, None where there is none."""
        return self._patiently(lambda: self.client.size(self._object(path)))

    def list(self, path: str) -> list[str]:
        """Returns the names directly below a path, sorted; none where there is nothing."""
        names = self._patiently(lambda: self.client.list(self._object(path)))
        return sorted({name for name in names if name and not name.startswith(OWN)})

    def find(self, path: str) -> dict[str, tuple[int, datetime]]:
        """Returns size in bytes and time of writing of all objects below a path, by their paths relative to it."""
        below = self._object(path)
        found = self._patiently(lambda: self.client.find(below))
        return {key.removeprefix(below).lstrip("/"): entry for key, entry in sorted(found.items())}

    def remove(self, path: str) -> None:
        """Removes an object, if it is there."""
        self._patiently(lambda: self.client.remove(self._object(path)))

    def tidy(self, path: str) -> None:
        """Removes a folder, if it is empty and the store has such things."""
        self.client.tidy(self._object(path))

    def upload(self, local_path: str, path: str, check: Callable[[], None] = lambda: None) -> str:
        """Copies a local file into the store.

        Args:
            local_path: The file.
            path: Where to.
            check: Called every few megabytes; a `BatonError` it raises ends the upload.

        Returns:
            SHA-256 of the bytes as they passed.
        """

        def send() -> str:
            check()
            digest = hashlib.sha256()

            def seen(block: Any) -> None:
                check()
                digest.update(block)

            try:
                self.client.upload(local_path, self._object(path), seen)
            except Exception:
                check()  # the client may have put another error in the place of the one raised
                raise
            self.sent += os.path.getsize(local_path)
            return digest.hexdigest()

        return self._patiently(send)

    def download(self, path: str, local_path: str, size: int | None = None) -> str:
        """Copies an object to a local file.

        Args:
            path: The object.
            local_path: The file; its folder is made.
            size: The object's bytes, where they are known.

        Returns:
            SHA-256 of the bytes as they passed.

        Raises:
            FileNotFoundError: there is no such object.
        """
        os.makedirs(os.path.dirname(local_path), exist_ok=True)

        def receive() -> str:
            known = self.client.size(self._object(path)) if size is None else size
            if known is None:
                raise FileNotFoundError(self.uri(path))
            try:
                digest = self.client.download(self._object(path), local_path, known)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise BatonError(
                    f"{os.path.dirname(local_path)} has no room for {self.uri(path)}, {known:,} bytes.",
                    remedy="Give the machine more disk, or /dev/shm more memory (resources.shm).",
                ) from None
            self.received += known
            return digest

        return self._patiently(receive)

    def sha256(self, path: str) -> tuple[int, str]:
        """Returns size in bytes and SHA-256 of an object, read through."""

        def read_through() -> tuple[int, str]:
            digest, size = hashlib.sha256(), 0
            for block in self.client.blocks(self._object(path)):
                digest.update(block)
                size += len(block)
            return size, digest.hexdigest()

        return self._patiently(read_through)

    def check(self) -> None:
        """Writes and removes a small object, without a second try.

        Raises:
            StoreError: the store cannot be written to, with the reason and the remedy.
        """
        path = f"{OWN}check-{uuid.uuid4().hex}"
        with self.translated():
            self.client.write(self._object(path), b"baton")
            self.client.remove(self._object(path))

    def _object(self, path: str) -> str:
        """Returns the client's own name of an object."""
        return self.key(path).partition("/")[2] if isinstance(self.client, S3) else self.key(path)

    def _patiently(self, operation: Callable[[], T]) -> T:
        """Runs an operation, again and again while the store does not answer, for as long as patience lasts."""
        began, pause = time.monotonic(), 0.2
        while True:
            try:
                with self.translated():
                    return operation()
            except UnavailableError as error:
                # A generator of its own: the global one is part of the training state.
                pause = min(2 * pause, LONGEST_PAUSE) * random.Random().uniform(0.75, 1.25)
                if time.monotonic() - began + pause > self.patience:
                    raise
                logger.warning("%s Next try in %.1f s.", error.message, pause)
            time.sleep(pause)

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turns the client library's errors into `StoreError`; a missing object stays FileNotFoundError."""
        try:
            yield
        except BatonError:
            raise
        except Exception as error:
            if is_missing(error):
                raise FileNotFoundError(" ".join(str(error).partition("Debug source:")[0].split())) from None
            raise explain(error, self.uri()) from error


def _root(uri: str, fs: Any) -> str:
    root: str = fs._strip_protocol(uri)
    return root.rstrip("/")


def _options(uri: str) -> dict[str, Any]:
    if not uri.startswith(("s3://", "s3a://")):
        return {"auto_mkdir": True} if "://" not in uri or uri.startswith("file://") else {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return {
        "use_listings_cache": False,
        "client_kwargs": {"region_name": region} if region else {},
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": 60,
            "retries": {"mode": "standard", "max_attempts": 4},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    }
