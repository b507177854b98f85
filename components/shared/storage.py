"""The object store: a folder and S3 behave alike, by way of fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from components.shared.errors import BatonError, StoreError

NO_BUCKET = "bucket does not exist"
"""How the S3 client tells a bucket that is missing from an object that is."""

BLOCK = 4 * 1024 * 1024
"""Bytes read at a time while a file is hashed on its way."""


class Storage:
    """Objects below one URI, named by paths relative to it.

    Args:
        uri: A folder, `file://…`, `s3://bucket[/prefix]` or any other fsspec URI. The endpoint and
            credentials come from the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …).

    Raises:
        StoreError: the URI has an unknown protocol.
    """

    def __init__(self, uri: str) -> None:
        try:
            self.fs, root = fsspec.core.url_to_fs(uri, **_options(uri))
        except (ValueError, TypeError, ImportError) as error:
            raise StoreError(
                f"store {uri!r} cannot be opened: {error}.", remedy="Use a folder or s3://bucket."
            ) from None
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.base_uri = self.root if self.is_local else self.fs.unstrip_protocol(self.root)
        if not self.is_local and not self.root:
            raise StoreError(f"store {uri!r} names no bucket.", remedy="Use s3://bucket or s3://bucket/prefix.")

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
        with self.translated():
            data: bytes = self.fs.cat_file(self.key(path))
            return data

    def write(self, path: str, data: bytes) -> None:
        """Writes a whole object, replacing what was there; readers see the old or the new one."""
        with self.translated():
            if self.is_local:
                with self._sibling(path) as temporary:
                    _write_synced(temporary, data)
                    os.replace(temporary, self.key(path))
            else:
                self.fs.pipe_file(self.key(path), data)

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object only if there is none: put-if-absent.

        Returns:
            Whether this call created it. Among any number of writers exactly one is told yes.
        """
        with self.translated():
            try:
                if self.is_local:
                    with self._sibling(path) as temporary:
                        _write_synced(temporary, data)
                        os.link(temporary, self.key(path))
                else:
                    self.fs.pipe_file(self.key(path), data, mode="create")
            except FileExistsError:
                return False
            return True

    def exists(self, path: str) -> bool:
        """Tells whether there is an object of this name."""
        with self.translated():
            try:
                return bool(self.fs.info(self.key(path))["type"] == "file")
            except FileNotFoundError:
                return False

    def list(self, path: str) -> list[str]:
        """Returns the names directly below a path, sorted; none where there is nothing."""
        with self.translated():
            try:
                found = self.fs.ls(self.key(path), detail=False, **({} if self.is_local else {"refresh": True}))
            except FileNotFoundError:
                return []
            names = {name.rstrip("/").rsplit("/", 1)[-1] for name in found}
            return sorted(name for name in names if name and not name.startswith(".baton-"))

    def upload(self, local_path: str, path: str) -> None:
        """Copies a local file into the store."""
        with self.translated():
            if self.is_local:
                _make_folder(os.path.dirname(self.key(path)))
                shutil.copyfile(local_path, self.key(path))
            else:
                self.fs.put_file(local_path, self.key(path))

    def download(self, path: str, local_path: str) -> str:
        """Copies an object to a local file.

        Returns:
            SHA-256 of the bytes as they passed.
        """
        digest = hashlib.sha256()
        os.makedirs(os.path.dirname(local_path), exist_ok=True)
        with (
            self.translated(),
            self.fs.open(self.key(path), "rb") as source,
            open(local_path, "wb") as target,
        ):
            while block := source.read(BLOCK):
                digest.update(block)
                target.write(block)
        return digest.hexdigest()

    def sha256(self, path: str) -> tuple[int, str]:
        """Returns size in bytes and SHA-256 of an object, read through."""
        digest, size = hashlib.sha256(), 0
        with self.translated(), self.fs.open(self.key(path), "rb") as source:
            while block := source.read(BLOCK):
                digest.update(block)
                size += len(block)
        return size, digest.hexdigest()

    def check(self) -> None:
        """Writes and removes a small object.

        Raises:
            StoreError: the store cannot be written to, with the reason and the remedy.
        """
        path = f".baton-check-{uuid.uuid4().hex}"
        self.write(path, b"baton")
        with self.translated():
            self.fs.rm_file(self.key(path))

    @contextlib.contextmanager
    def _sibling(self, path: str) -> Iterator[str]:
        """Yields a temporary name beside a local object, so that a rename or link is atomic."""
        folder = os.path.dirname(self.key(path))
        _make_folder(folder)
        temporary = f"{folder}/.baton-{uuid.uuid4().hex}"
        try:
            yield temporary
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turns the client library's errors into `StoreError`; a missing object stays FileNotFoundError."""
        try:
            yield
        except BatonError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and NO_BUCKET not in str(error):
                raise
            raise _explain(error, self.uri()) from error


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


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{folder} is a file, expected a folder") from None


def _write_synced(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _explain(error: Exception, uri: str) -> Exception:
    """Turns a client library's error into one a person can act on."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    known = f"{kind} {text}"
    if "NoCredentials" in known or "PartialCredentials" in known:
        return StoreError(
            f"store {uri!r}: no credentials found.",
            remedy="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a Secret in resources.secret.",
        )
    if isinstance(error, PermissionError) or "403" in known or "InvalidAccessKeyId" in known:
        return StoreError(f"store {uri!r}: access denied ({text}).", remedy="Check the credentials and their rights.")
    if any(
        word in known for word in ("EndpointConnection", "ConnectTimeout", "Could not connect", "ConnectionRefused")
    ):
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "AWS's own endpoint")
        return StoreError(
            f"store {uri!r}: {endpoint} cannot be reached.", remedy="Check AWS_ENDPOINT_URL and the network."
        )
    if "NoSuchBucket" in known or NO_BUCKET in known:
        return StoreError(f"store {uri!r}: the bucket does not exist.", remedy="Create it first.")
    if "Invalid endpoint" in known:
        return StoreError(
            f"store {uri!r}: AWS_ENDPOINT_URL is no address ({text}).", remedy="Write http://HOST:PORT or https://HOST."
        )
    return StoreError(f"store {uri!r}: {kind}: {text}.", remedy="Use a folder or s3://bucket that can be written to.")
