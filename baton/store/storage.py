"""Object store with retries, and leases where it lacks put-if-absent (see `create_leased`)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import ClassVar, Protocol, TypeVar

from baton import machine
from baton.errors import BatonError, UnavailableError
from baton.runtime import SYSTEM, Runtime, backoff, retry
from baton.store import protocol
from baton.store.clouds import CLOUDS, CloudStore
from baton.store.folder import FileSystem, Folder
from baton.store.protocol import (
    OWN,
    ObjectInfo,
    ObjectStore,
    below,
)

logger = logging.getLogger("baton")
T = TypeVar("T")

# Environment variable: seconds for which an operation is retried while the store does not answer.
PATIENCE = "BATON_STORE_PATIENCE"
LONGEST_PAUSE = 10.0  # seconds between two tries, at most
LEASE_S = 20.0  # seconds after which an unchanged lease has expired
LEASE_SETTLE_S = 0.5  # seconds within which a writer that saw no lease has written its own, in a quick store
_counting = threading.Lock()


def open_store(uri: str) -> ObjectStore:
    """Returns the client for an address; nothing is asked of the store yet."""
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == "file":
        return Folder(uri)
    return CloudStore(uri, CLOUDS[scheme]) if scheme in CLOUDS else FileSystem(uri)


def create_leased(client: ObjectStore, path: str, data: bytes, runtime: Runtime = SYSTEM) -> bool:
    """Writes an object unless there is one, under the lease `<path>.lease`; tells whether the object there is this.

    A writer writes its name into the lease, waits for others that read at the same time, and reads it back: the one
    whose name is in it proceeds. A lease unchanged for `LEASE_S` was left by a writer that died. Each writer measures
    that on its own clock, so clocks need not agree: those that wait count from their first sight of the name, the
    holder from before it wrote it, so its time ends first. A writer that was stopped between two requests notices and
    begins again. A put on its way for longer than a quarter of `LEASE_S` can still come too late; it then replaces a
    manifest of the same step, and either names files that are whole.

    Seconds after reading the lease, with `LEASE_S` 20: a writer whose name was in it within 0.5 reads it back 0.5
    later and writes until 5. One that took up to 5 may have put its name over such a holder's: it waits until 10, when
    the holder's last request has arrived, reads back, and writes until 15. All others wait 20.
    """
    lease, owner = f"{path}.lease", runtime.unique().encode()
    until = _acquire_lease(client, path, lease, owner, runtime)
    if until is None:
        return False
    is_there = False
    try:
        # Again, now that no other may write: the last holder may have written after the look in `_acquire_lease` and
        # before its release. The lease of a crash from here on expires, with the object or without it.
        is_there = client.size(path) is not None
        if is_there:
            return False
        if runtime.monotonic() > until:
            raise UnavailableError(f"the lease {lease} was not held for long enough to write in.")
        client.write(path, data)
        is_there = True
        # Empty, gone again: retention has removed the bundle that it saw committed.
        return _content(client, path) in (data, b"")
    finally:
        # Once the object is there, no lease is needed any more. Before, it may have expired, and be another's by the
        # time that a removal arrives.
        if _content(client, lease) == owner and (is_there or runtime.monotonic() < until):
            remove_quietly(client, lease)


def remove_quietly(client: ObjectStore, path: str) -> None:
    """Removes a harmless object; it stays where removal is denied."""
    try:
        client.remove(path)
    except Exception as error:
        if not isinstance(client.explain(error), protocol.DeniedError):
            raise


def _acquire_lease(client: ObjectStore, path: str, lease: str, owner: bytes, runtime: Runtime) -> float | None:
    """Waits for the lease, and returns until when requests may begin; None once the object is there."""
    # Requests that begin in time have another quarter of `LEASE_S` to arrive in.
    seen, since = b"", runtime.monotonic()
    for _ in backoff(math.inf, pause=LEASE_SETTLE_S, runtime=runtime):
        if client.size(path) is not None:
            break
        looked = runtime.monotonic()
        holder = _content(client, lease)
        # A holder's name is new with each attempt: while it changes, somebody is alive.
        if holder != seen:
            seen, since = holder, runtime.monotonic()
        if not holder or runtime.monotonic() - since > LEASE_S:
            client.write(lease, owner)
            took = runtime.monotonic() - looked
            if took > LEASE_S / 4:
                raise UnavailableError(f"{lease} took {took:.1f} s to read and write; {LEASE_S / 4:g} are safe.")
            # All that saw no lease write theirs; each reads after the last has written, and all find one name.
            runtime.sleep(LEASE_SETTLE_S if took <= LEASE_SETTLE_S else LEASE_S / 2)
            if _content(client, lease) == owner:
                return looked + (LEASE_S / 4 if took <= LEASE_SETTLE_S else LEASE_S * 3 / 4)
    return None


def _content(client: ObjectStore, path: str) -> bytes:
    try:
        return client.read(path)
    except FileNotFoundError:
        return b""


class Watch(Protocol):
    """Sees the objects of a process; see `baton.checkpoint.seals`."""

    def held(self, storage: Storage, path: str) -> bytes | None:
        """Returns the content of an object that need not be read again, else None."""

    def read(self, storage: Storage, path: str, data: bytes | None) -> bytes | None:
        """Returns the content to use in place of an object's that was read; None is a missing object."""

    def wrote(self, storage: Storage, path: str, digest: str, data: bytes | None) -> None:
        """Takes the SHA-256 of an object that was written, and its content where it was not a file."""


class Storage:
    """Objects below one URI, a folder or an address, named by paths relative to it.

    Endpoint and credentials come from the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, …). Operations are
    retried for `patience` seconds while the store does not answer: by default `BATON_STORE_PATIENCE`, else 10. `client`
    raises errors of its library, see `translated`. `sent` and `received` count bytes of files that this process has
    uploaded and downloaded. `watches` see all small objects that this process reads, and all that it writes. A URI with
    an unknown protocol or without a bucket is a StoreError.
    """

    watches: ClassVar[tuple[Watch, ...]] = ()

    def __init__(
        self, uri: str, *, patience: float | None = None, client: ObjectStore | None = None, runtime: Runtime = SYSTEM
    ) -> None:
        self.patience = machine.number_of(PATIENCE, 10) if patience is None else patience
        self.runtime = runtime
        self.client: ObjectStore = client or open_store(uri)
        self.base_uri, self.root, self.is_local = self.client.uri, self.client.root, self.client.is_local
        self.sent = self.received = 0
        self._is_kept = False

    def uri(self, path: str = "") -> str:
        return f"{self.base_uri}/{path}".rstrip("/")

    def key(self, path: str = "") -> str:
        """Returns an object's address without its scheme: in a folder store its path on this machine."""
        return below(self.root, path)

    def read(self, path: str) -> bytes:
        for watch in self.watches:
            if (held := watch.held(self, path)) is not None:
                return held
        try:
            data: bytes | None = self._patiently(lambda: self.client.read(path))
        except FileNotFoundError:
            if not self.watches:
                raise
            data = None
        for watch in self.watches:
            data = watch.read(self, path, data)
        if data is None:
            raise FileNotFoundError(self.uri(path))
        return data

    def first_lines(self, path: str, count: int) -> list[bytes]:
        """Returns the first lines of an object without their ends, and reads no more blocks than hold them."""

        def read() -> list[bytes]:
            data, ends = bytearray(), 0
            for block in self.client.blocks(path):
                data += block
                ends += block.count(b"\n")
                if ends >= count:
                    break
            return bytes(data).split(b"\n", count)[:count]

        return self._patiently(read)

    def first_bytes(self, path: str, count: int) -> bytes:
        """Returns the first bytes of an object, all of a shorter one."""

        def read() -> bytes:
            data = bytearray()
            for block in self.client.blocks(path):
                data += block
                if len(data) >= count:
                    break
            return bytes(data[:count])

        return self._patiently(read)

    def write(self, path: str, data: bytes) -> None:
        self._patiently(lambda: self.client.write(path, data))
        self._tell(path, data)

    def _tell(self, path: str, data: bytes) -> None:
        for watch in self.watches:
            watch.wrote(self, path, hashlib.sha256(data).hexdigest(), data)

    def create(self, path: str, data: bytes) -> bool:
        """Put-if-absent: writes an object only if there is none, and tells whether this call did.

        At most one of several writers gets True. None does where the answer to a put was lost: the next try finds its
        own object. A caller that must know reads it back (`BundleWriter.commit`, `lineage.accept`).
        """
        if self.has_conditional_put:
            is_made = self._patiently(lambda: self.client.create(path, data))
        else:
            is_made = self._patiently(lambda: create_leased(self.client, path, data, self.runtime))
        if is_made:
            self._tell(path, data)
        return is_made

    @cached_property
    def has_conditional_put(self) -> bool:
        """Whether the store refuses a put over an object: known of its kind, or tried once."""
        if self.client.create_is_certain:
            return True
        # Under a unique name, as many processes try at once; an object of a crash is one that `list` does not show.
        path = f"{OWN}probe-{self.runtime.unique()}"

        def probe() -> bool:
            try:
                # A server that ignores the condition lets both through; one that does not know it refuses the first.
                return self.client.create(path, b"1") and not self.client.create(path, b"2")
            finally:
                remove_quietly(self.client, path)

        try:
            return self._patiently(probe)
        except protocol.UnknownRequestError:
            return False

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def size(self, path: str) -> int | None:
        return self._patiently(lambda: self.client.size(path))

    def list(self, path: str) -> list[str]:
        """Returns the names directly below a path, sorted; none where there is nothing."""
        names = self._patiently(lambda: self.client.list(path))
        return sorted({name for name in names if name and not name.startswith(OWN)})

    def find(self, path: str) -> dict[str, ObjectInfo]:
        return dict(sorted(self._patiently(lambda: self.client.find(path)).items()))

    def remove(self, path: str, is_still_so: Callable[[], bool] = lambda: True) -> bool:
        """Removes an object, and tells whether it did: not where removal is denied."""
        tries = itertools.count()

        def attempt() -> bool:
            if next(tries) and not is_still_so():  # between tries, another process may have reused the name
                return False
            self.client.remove(path)
            return True

        try:
            return self._patiently(attempt)
        except protocol.DeniedError as error:
            self._keep(error)
            return False

    @cached_property
    def cannot_remove(self) -> protocol.DeniedError | None:
        """Error of a cloud that denies removal, else None: tried once with an object that does not exist."""
        if not isinstance(self.client, CloudStore):
            return None
        try:
            self._patiently(lambda: self.client.remove(f"{OWN}probe-{self.runtime.unique()}"))
        except protocol.DeniedError as error:
            self._keep(error)
            return error
        return None

    def _keep(self, error: protocol.DeniedError) -> None:
        if not self._is_kept:
            self._is_kept = True
            logger.warning("Unneeded objects stay in the store. %s", error)

    def tidy(self, path: str) -> None:
        self.client.tidy(path)

    def upload(self, local_path: str, path: str, check: Callable[[], None] = lambda: None) -> str:
        """Uploads a local file, and returns the SHA-256 of the bytes sent; a BatonError of `check` ends the upload."""

        def send() -> str:
            check()
            digest = hashlib.sha256()  # new with each try, which sends the file from its first byte

            def seen(block: bytes) -> None:
                check()
                digest.update(block)

            try:
                self.client.upload(local_path, path, seen)
            except Exception:
                check()  # the client may have replaced the error that it raised
                raise
            size = os.path.getsize(local_path)  # counted once, whatever failed tries have sent
            with _counting:
                self.sent += size
            return digest.hexdigest()

        sent = self._patiently(send)
        for watch in self.watches:
            watch.wrote(self, path, sent, None)
        return sent

    def copy(self, source: str, path: str, size: int) -> bool:
        """Copies an object of this size inside the store, and tells whether it did: not every store can."""
        return self._patiently(lambda: self.client.copy(source, path, size) and self.client.size(path) == size)

    def download(self, path: str, local_path: str, size: int | None = None) -> str:
        """Downloads an object to a local file, makes its folder, and returns the SHA-256."""
        os.makedirs(os.path.dirname(local_path), exist_ok=True)

        def receive() -> str:
            known = self.client.size(path) if size is None else size
            if known is None:
                raise FileNotFoundError(self.uri(path))
            try:
                digest = self.client.download(path, local_path, known)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise BatonError(
                    f"{os.path.dirname(local_path)} has no room for {self.uri(path)}, {known:,} bytes.",
                    remedy="Give the machine more disk, or /dev/shm more memory (resources.shm).",
                ) from None
            with _counting:
                self.received += known
            return digest

        return self._patiently(receive)

    def sha256(self, path: str) -> tuple[int, str]:
        def read_through() -> tuple[int, str]:
            digest, size = hashlib.sha256(), 0
            for block in self.client.blocks(path):
                digest.update(block)
                size += len(block)
            return size, digest.hexdigest()

        return self._patiently(read_through)

    def check(self) -> None:
        """Writes a small object, without a retry, and removes it where that is allowed."""
        path = f"{OWN}check-{self.runtime.unique()}"
        with self.translated():
            self.client.write(path, b"baton")
            remove_quietly(self.client, path)

    def _patiently(self, operation: Callable[[], T]) -> T:
        def attempt() -> T:
            with self.translated():
                return operation()

        # Only `UnavailableError` is retried: a denied or missing object stays so.
        return retry(
            attempt,
            UnavailableError,
            backoff(self.patience, pause=0.4, growth=2, longest=LONGEST_PAUSE, jitter=0.25, runtime=self.runtime),
            lambda error, attempt: logger.warning("%s Next try in %.1f s.", error.message, attempt.pause),
        )

    @contextlib.contextmanager
    def translated(self, path: str | None = None) -> Iterator[None]:
        """Turns the client library's errors into `StoreError`; a missing object stays a FileNotFoundError.

        `path` is an object that is read past the client; where that is refused, a listing tells whether it is missing.
        """
        try:
            yield
        except BatonError:
            raise
        except Exception as error:
            explained = self.client.explain(error, path)
            is_clear = isinstance(explained, FileNotFoundError)
            # A signed address in the cause would be printed with a traceback.
            raise explained from (None if is_clear or protocol.without_signature(str(error)) != str(error) else error)
