"""S3 by way of obstore: parallel parts and ranges, and few processor cycles per byte.

s3fs stays the client for reading a user's sources. For Baton's own objects it spent three times the
processor time per byte and 0.6 s of import in every pod; the figures are in `DECISIONS.md`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import islice
from typing import Any
from urllib.parse import urlparse

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError
from obstore.store import S3Store

from components.shared.errors import StoreError

PART = 16 * 1024 * 1024
"""Bytes per request when a large object is written."""
RANGE = 8 * 1024 * 1024
"""Bytes per request when an object is read."""
PARALLEL = 4
"""Requests in flight for one large object."""

READ_TIMEOUT = "20s"
"""How long a request waits for the next bytes of its answer."""


class S3:
    """Objects of one bucket, by key.

    Args:
        uri: `s3://bucket[/prefix]`; only the bucket matters here.

    Raises:
        StoreError: there are no credentials, or `AWS_ENDPOINT_URL` is no address.
    """

    def __init__(self, uri: str) -> None:
        bucket = uri.partition("://")[2].partition("/")[0]
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and urlparse(endpoint).scheme not in ("http", "https"):
            raise StoreError(
                f"store {uri!r}: AWS_ENDPOINT_URL is no address (Invalid endpoint: {endpoint}).",
                remedy="Write http://HOST:PORT or https://HOST.",
            )
        plain = bool(endpoint and endpoint.startswith("http:"))
        options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        self._store = S3Store(
            bucket,
            region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
            credential_provider=_credentials(uri),
            # The SHA-256 in the manifest guards the bytes from end to end; signing them as well costs a second hash.
            unsigned_payload=True,
            client_options={
                "allow_http": plain,
                "connect_timeout": "5s",
                "read_timeout": READ_TIMEOUT,
                "timeout": "120s",
            },
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=30)},
            **options,
        )

    def read(self, key: str) -> bytes:
        """Returns a whole object."""
        return bytes(obstore.get(self._store, key).bytes())

    def write(self, key: str, data: bytes) -> None:
        """Writes a small object, replacing what was there."""
        obstore.put(self._store, key, data, use_multipart=False)

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object unless there is one: a put with `If-None-Match: *`."""
        try:
            obstore.put(self._store, key, data, mode="create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def size(self, key: str) -> int | None:
        """Returns an object's bytes, None where there is no object."""
        try:
            return int(obstore.head(self._store, key)["size"])
        except (NotFoundError, FileNotFoundError):
            return None

    def list(self, key: str) -> list[str]:
        """Returns the names directly below a key."""
        found = obstore.list_with_delimiter(self._store, key or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def find(self, key: str) -> dict[str, tuple[int, datetime]]:
        """Returns size and time of all objects at any depth below a key, by key."""
        batches = obstore.list(self._store, key or None)
        return {entry["path"]: (entry["size"], entry["last_modified"]) for batch in batches for entry in batch}

    def remove(self, key: str) -> None:
        """Removes an object, if it is there."""
        obstore.delete(self._store, key)

    def tidy(self, key: str) -> None:
        """Nothing: S3 has no folders that could be left empty."""

    def upload(self, local_path: str, key: str, seen: Callable[[memoryview], None]) -> None:
        """Sends a file in parallel parts.

        Args:
            local_path: The file.
            key: Where to.
            seen: Called with the bytes in their order; what it raises ends the upload.
        """
        size = os.path.getsize(local_path)
        if size <= PART:
            with open(local_path, "rb") as file:
                data = file.read()
            seen(memoryview(data))
            obstore.put(self._store, key, data, use_multipart=False)
            return
        with open(local_path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            obstore.put(
                self._store, key, _parts(mapped, seen), use_multipart=True, chunk_size=PART, max_concurrency=PARALLEL
            )

    def download(self, key: str, local_path: str, size: int) -> str:
        """Fetches an object of known size in parallel ranges.

        Returns:
            SHA-256 of the bytes, taken in their order while later ones are on their way.
        """
        digest = hashlib.sha256()
        with open(local_path, "wb") as file:
            os.ftruncate(file.fileno(), size)
            self._fetch_into(key, file.fileno(), size, digest)
        return digest.hexdigest()

    def blocks(self, key: str) -> Iterator[bytes]:
        """Yields an object's bytes in order."""
        for block in obstore.get(self._store, key).stream(min_chunk_size=4 * 1024 * 1024):
            yield bytes(block)

    def _fetch_into(self, key: str, descriptor: int, size: int, digest: Any) -> None:
        def receive(start: int) -> obstore.Bytes:
            end = min(start + RANGE, size)
            data = obstore.get_range(self._store, key, start=start, end=end)
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} bytes came of {end - start} asked for")
            os.pwrite(descriptor, data, start)  # unlike a write to a mapping, this frees the interpreter
            return data

        starts = iter(range(0, size, RANGE))
        with ThreadPoolExecutor(PARALLEL) as pool:
            coming = deque(pool.submit(receive, start) for start in islice(starts, PARALLEL + 2))
            try:
                while coming:
                    data = coming.popleft().result()
                    coming.extend(pool.submit(receive, start) for start in islice(starts, 1))
                    digest.update(data)  # from the answer itself: reading the file back costs a fault per page
            finally:
                for request in coming:
                    request.cancel()


def _parts(mapped: mmap.mmap, seen: Callable[[memoryview], None]) -> Iterator[bytes]:
    for start in range(0, len(mapped), PART):
        part = mapped[start : start + PART]
        seen(memoryview(part))
        yield part


def _credentials(uri: str) -> Callable[[], Any] | None:
    """Returns None where the client finds credentials in the environment, else botocore's chain as a provider.

    The chain knows profiles, SSO and instance metadata; importing it costs a pod 0.3 s, so only those pay that need it.
    """
    own = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(os.environ.get(name) for name in (*own, "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
        return None
    import botocore.session

    found = botocore.session.get_session().get_credentials()
    if found is None:
        raise StoreError(
            f"store {uri!r}: no credentials found.",
            remedy="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a Secret in resources.secret.",
        )

    def provide() -> dict[str, Any]:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(found, "_expiry_time", None),
        }

    return provide
