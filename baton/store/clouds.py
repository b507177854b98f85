"""Stores of S3, Google and Azure through obstore, with parallel parts and ranges.

A store scheme is a `Cloud` here and its place in `CLOUDS`; all other lists of schemes follow.

fsspec's clients took three times the processor time per byte, and 0.6 s of import in every pod. They only read sources
of data (`docs/internals/decisions/0007-obstore-for-batons-objects.md`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlparse

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from baton import machine
from baton.errors import StoreError
from baton.store import protocol

if TYPE_CHECKING:
    from hashlib import _Hash

    from fsspec import AbstractFileSystem
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

# Bytes per request of a large write, or more where the object would have more than `MOST_PARTS`.
PART = 16 * 1024 * 1024
MOST_PARTS = 10_000  # S3's limit for one object
RANGE = 8 * 1024 * 1024  # bytes per request of a read
PARALLEL = 4  # requests in flight for one large object
READ_TIMEOUT = "20s"  # limit for the next bytes of an answer
RETRIES: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """A kind of cloud: its clients, and the meaning of its errors."""

    schemes: tuple[str, ...]  # of its addresses; Baton writes the first
    # Prefixes of the variables that its client reads: containers and forked stages get these.
    environment: tuple[str, ...]
    keys: str  # the variables with its credentials, in words
    # Store's URI → scheme and host of requests, by which their proxy is chosen; StoreError where variables give none.
    address: Callable[[str], str]
    open: Callable[[str, str], ObjectStore]  # store's URI and bucket → obstore's client
    file_system: Callable[[str], AbstractFileSystem]  # address of requests → fsspec file system
    words: protocol.StoreMessages
    create_is_certain: bool = False  # as in `baton.store.protocol.ObjectStore`
    largest_copy: int = -1  # bytes of the largest object that one request copies; no object where negative


class CloudStore:
    """Objects of one bucket below a prefix, at `<scheme>://bucket[/prefix]`; any other address is a StoreError."""

    is_local = False

    def __init__(self, uri: str, cloud: Cloud) -> None:
        self.cloud = cloud
        self.create_is_certain = cloud.create_is_certain
        self.root = uri.partition("://")[2].strip("/")
        self.bucket, _, self._prefix = self.root.partition("/")
        scheme, container = cloud.schemes[0], cloud.words.container
        if "@" in self.bucket or "?" in self.root:  # not repeated in the message: it may hold a key
            raise StoreError(
                f"the address of a store holds more than a {container} and a prefix.",
                remedy=f"Write {scheme}://{container}/prefix; credentials come from the environment.",
            )
        if not self.bucket:
            raise StoreError(
                f"store {uri!r} names no {container}.",
                remedy=f"Use {scheme}://{container} or {scheme}://{container}/prefix.",
            )
        if {"", ".", ".."} & set(self._prefix.split("/")) and self._prefix:
            parts = [part for part in self.root.split("/") if part not in ("", ".", "..")]
            raise StoreError(
                f"store {uri!r} has an empty part in its prefix, or one of dots.",
                remedy=f"Write {scheme}://{'/'.join(parts)}.",
            )
        self.uri = f"{scheme}://{self.root}"

    @property
    def address(self) -> str:
        return self.cloud.address(self.uri)

    @cached_property
    def _store(self) -> ObjectStore:
        return self.cloud.open(self.uri, self.bucket)

    def read(self, path: str) -> bytes:
        with self._looked_for(path):
            return bytes(obstore.get(self._store, self._key(path)).bytes())

    def write(self, path: str, data: bytes) -> None:
        obstore.put(self._store, self._key(path), data, use_multipart=False)

    def create(self, path: str, data: bytes) -> bool:
        try:
            obstore.put(self._store, self._key(path), data, mode="create")
        except (AlreadyExistsError, PreconditionError):  # either, depending on the cloud
            return False
        return True

    def size(self, path: str) -> int | None:
        try:
            return int(obstore.head(self._store, self._key(path))["size"])
        except (NotFoundError, FileNotFoundError):
            return None
        except Exception as error:
            if not protocol.answer(error).may_be_missing:
                raise
            return self._listed_size(path, error)

    def list(self, path: str) -> list[str]:
        listing = obstore.list_with_delimiter(self._store, self._key(path) or None)
        keys = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])]
        return [key.rstrip("/").rsplit("/", 1)[-1] for key in keys]

    def find(self, path: str) -> dict[str, protocol.ObjectInfo]:
        below = self._key(path)
        return {
            entry["path"].removeprefix(below).lstrip("/"): protocol.ObjectInfo(entry["size"], entry["last_modified"])
            for batch in obstore.list(self._store, below or None)
            for entry in batch
        }

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, self._key(path))

    def tidy(self, path: str) -> None:
        """Does nothing: clouds have no folders."""

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        size = os.path.getsize(local_path)
        if size <= PART:
            with open(local_path, "rb") as file:
                data = file.read()
            seen(data)
            obstore.put(self._store, self._key(path), data, use_multipart=False)
            return
        part = max(PART, -(-size // MOST_PARTS))
        with open(local_path, "rb") as file:
            # The object appears once its last part is confirmed: a writer that dies before writes no half of one.
            obstore.put(
                self._store,
                self._key(path),
                _parts(file, size, part, seen),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=PARALLEL,
            )

    def copy(self, source: str, path: str, size: int) -> bool:
        if size > self.cloud.largest_copy:
            return False
        try:
            with self._looked_for(source):
                obstore.copy(self._store, self._key(source), self._key(path))
        except (NotFoundError, FileNotFoundError) as error:
            if any(part in str(error) for part in self.cloud.words.no_container):
                raise
            # `protocol.explain` would take this put that finds nothing for a missing bucket.
            raise FileNotFoundError(f"{self.uri}/{source}") from None
        return True

    def download(self, path: str, local_path: str, size: int) -> str:
        digest = hashlib.sha256()
        with open(local_path, "wb") as file:
            os.ftruncate(file.fileno(), size)  # ranges come in any order, and are written at their places
            with self._looked_for(path):
                self._fetch_into(self._key(path), file.fileno(), size, digest)
        return digest.hexdigest()

    def blocks(self, path: str) -> Iterator[bytes]:
        with self._looked_for(path):
            found = obstore.get(self._store, self._key(path))
        for block in found.stream(min_chunk_size=protocol.BLOCK):
            yield bytes(block)

    def explain(self, error: Exception, path: str | None = None) -> Exception:
        # With a path, of an object read past this client, a listing tells whether it is missing.
        if path is not None and protocol.answer(error).may_be_missing:
            try:
                if self._listed_size(path, error) is None:
                    return FileNotFoundError(f"{self.uri}/{path}")
            except Exception as second:
                error = second
        return protocol.explain(error, self.uri, self.cloud.words, machine.proxy_for(self.address))

    @contextlib.contextmanager
    def _looked_for(self, path: str) -> Iterator[None]:
        """Tells a missing object from one that may not be read: S3 may answer both alike."""
        try:
            yield
        except Exception as error:
            if protocol.answer(error).may_be_missing and self._listed_size(path, error) is None:
                raise FileNotFoundError(f"{self.uri}/{path}") from None
            raise

    def _listed_size(self, path: str, error: Exception) -> int | None:
        """Returns an object's size by a listing, None where there is no object; `error` is of the request before.

        Without the right to list all of a bucket, S3 answers 403 for a missing key; and the answer to a HEAD has no
        body with a reason.
        """
        key = self._key(path)
        parent = key.rpartition("/")[0]
        try:
            for batch in obstore.list(self._store, parent or None, offset=key[:-1] or None):
                for entry in batch:
                    if entry["path"] == key:
                        return int(entry["size"])
                    if entry["path"] > key:
                        return None
        except Exception as second:
            found = protocol.answer(second)
            if found.status != 403 or found.code not in ("", "AccessDenied"):
                raise  # both requests fail for the same reason
            reason = ": ".join(part for part in (found.code or "403", found.message.rstrip(".")) if part)
            raise protocol.denied(protocol.answer(error), self.uri, self.cloud.words, reason, or_missing=True) from None
        return None

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".strip("/")

    def _fetch_into(self, key: str, descriptor: int, size: int, digest: _Hash) -> None:
        def receive(start: int) -> obstore.Bytes:
            end = min(start + RANGE, size)
            data = obstore.get_range(self._store, key, start=start, end=end)
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} bytes came of {end - start} asked for")
            rest, at = memoryview(data), start
            while rest:  # a disk that is nearly full takes a part, and fails the next call
                written = os.pwrite(descriptor, rest, at)  # unlike a write to a mapping, this frees the interpreter
                rest, at = rest[written:], at + written
            return data

        starts = iter(range(0, size, RANGE))
        with ThreadPoolExecutor(PARALLEL) as pool:
            # Two more than are in flight, so that no request waits for the hash; memory holds no more of the object.
            coming = deque(pool.submit(receive, start) for start in islice(starts, PARALLEL + 2))
            try:
                while coming:
                    data = coming.popleft().result()
                    # The next request goes out before this answer is hashed.
                    coming.extend(pool.submit(receive, start) for start in islice(starts, 1))
                    digest.update(data)  # from the answer itself: reading the file back costs a fault per page
            finally:
                for request in coming:
                    request.cancel()  # after an error, further requests would only delay its report


def _parts(file: BinaryIO, size: int, part: int, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    # Read, not mapped: a copy from mapped pages holds the interpreter, which the training thread needs.
    for start in range(0, size, part):
        data = file.read(min(part, size - start))
        if len(data) < min(part, size - start):
            raise StoreError(f"{file.name} became shorter while it was sent.")
        seen(data)
        yield data


def client_options(address: str) -> ClientConfig:
    """Returns a client's time limits and proxy; plain HTTP only for an `http:` address."""
    options: ClientConfig = {
        "allow_http": address.startswith("http:"),
        "connect_timeout": "5s",
        "read_timeout": READ_TIMEOUT,
        "timeout": "120s",
    }
    # The client reads the same variables, but of NO_PROXY not `host:port`, `*` or the end of an address.
    named = machine.named_proxy(address)
    if named and not machine.proxy_for(address):
        excluded = [urlparse(address).hostname or "", os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""]
        options |= {"proxy_url": named.url, "proxy_excludes": ",".join(excluded)}
    return options


def _endpoint(uri: str, *variables: str) -> str | None:
    """Returns the server's address from the first variable that is set."""
    endpoint = next((value for variable in variables if (value := os.environ.get(variable))), None)
    if endpoint and urlparse(endpoint).scheme not in ("http", "https"):
        raise StoreError(
            f"store {uri!r}: {variables[-1]} is not an address (Invalid endpoint: {endpoint}).",
            remedy="Write http://HOST:PORT or https://HOST.",
        )
    return endpoint


def _obstore_files(protocol: str, address: str) -> AbstractFileSystem:
    """Returns obstore's own file system, so that no other client is needed."""
    from obstore import fsspec  # imports asyncio, so only where rows are read

    make: Any = fsspec.FsspecStore  # typed for each protocol apart
    return cast("AbstractFileSystem", make(protocol, client_options=client_options(address), retry_config=RETRIES))


S3_RIGHTS = {"read": "s3:GetObject", "write": "s3:PutObject", "list": "s3:ListBucket", "remove": "s3:DeleteObject"}


def _s3_region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def _s3_endpoint(uri: str) -> str | None:
    return _endpoint(uri, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def _s3_address(uri: str) -> str:
    return _s3_endpoint(uri) or f"https://s3.{_s3_region() or 'us-east-1'}.amazonaws.com"


def _open_s3(uri: str, bucket: str) -> ObjectStore:
    # One object is removed at a time; for a request that may name many, Ceph wants the right to the whole bucket.
    config: S3Config = {"disable_bulk_delete": True}
    if endpoint := _s3_endpoint(uri):
        config["endpoint"] = endpoint
    return S3Store(
        bucket,
        region=_s3_region() or "us-east-1",
        credential_provider=_s3_credentials(uri),
        # The SHA-256 in the manifest guards the bytes from end to end; signing them as well costs a second hash.
        unsigned_payload=True,
        client_options=client_options(_s3_address(uri)),
        retry_config=RETRIES,
        config=config,
    )


def _s3_credentials(uri: str) -> Callable[[], S3Credential] | None:
    """Returns None where the client finds credentials in the environment, else botocore's chain as a provider."""
    # The chain knows profiles, SSO and instance metadata, but its import costs a pod 0.3 s.
    own = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(os.environ.get(name) for name in (*own, "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
        return None
    import botocore.session

    credentials = botocore.session.get_session().get_credentials()
    if credentials is None:
        raise protocol.no_credentials(uri, S3.words)

    def provide() -> S3Credential:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    return provide


def _s3_files(address: str) -> AbstractFileSystem:
    """Returns s3fs, with time limits and without a cache of listings."""
    import fsspec

    region, proxy = _s3_region(), machine.proxy_for(address)
    return cast(
        "AbstractFileSystem",
        fsspec.filesystem(
            "s3",
            use_listings_cache=False,
            client_kwargs={"region_name": region} if region else {},
            config_kwargs={
                "proxies": dict.fromkeys(("http", "https"), proxy.url) if proxy else {},
                "connect_timeout": 5,
                "read_timeout": 60,
                "retries": {"mode": "standard", "max_attempts": 4},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
        ),
    )


def _s3_cause(answer: protocol.ServerAnswer) -> tuple[str, str] | None:
    # <https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>
    code, message = answer.code, answer.message.lower()
    match code:
        case "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" | "RequestExpired":
            return "the credentials have expired", (
                "Get new ones and set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or renew the "
                "Secret that resources.secret names."
            )
        case "InvalidToken" | "InvalidTokenId" | "InvalidClientTokenId" | "UnrecognizedClientException":
            return "the session token is not of these keys", (
                "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN from one log-in. Unset "
                "AWS_SESSION_TOKEN for a user's own keys, which have none."
            )
        case "InvalidAccessKeyId":
            return "access denied", (
                "Check AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN of a temporary key, and AWS_ENDPOINT_URL."
            )
        case "SignatureDoesNotMatch":
            return "access denied", ("Check AWS_SECRET_ACCESS_KEY, and AWS_REGION, which is signed too.")
        case "RequestTimeTooSkewed":
            return f"the clock of this machine is {_s3_skew(answer)}", "Set the clock by NTP."
        case "PermanentRedirect" | "TemporaryRedirect" | "Redirect" | "AuthorizationHeaderMalformed":
            where = answer.fields.get("Region")
        case "IllegalLocationConstraintException":
            where = None
        case _ if "checksum" in message or "content-md5" in message or code == "MissingContentMD5":
            return "the bucket wants a checksum with each request", (
                "Set AWS_CHECKSUM_ALGORITHM=SHA256; in pods, by resources.env."
            )
        case _:
            return None
    asked = _s3_region() or "us-east-1"
    if code == "AuthorizationHeaderMalformed" and not where and "region" not in message:
        return None
    return (
        f"the bucket is in {f'region {where}' if where else 'another region'}, and {asked} was asked",
        f"Set AWS_REGION={where}." if where else "Set AWS_REGION to the bucket's region.",
    )


def _s3_skew(answer: protocol.ServerAnswer) -> str:
    try:
        asked = datetime.strptime(answer.fields["RequestTime"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        apart = (asked - datetime.fromisoformat(answer.fields["ServerTime"])).total_seconds() / 60
    except (KeyError, ValueError):
        return "more than 15 minutes off"
    return f"{abs(apart):.0f} minutes {'fast' if apart > 0 else 'slow'}"


def _s3_allow(right: str, root: str) -> str:
    bucket, _, prefix = root.partition("/")
    below = f"{prefix}/*" if prefix else "*"
    statement: dict[str, object] = {"Effect": "Allow", "Action": S3_RIGHTS[right], "Resource": f"arn:aws:s3:::{bucket}"}
    if right != "list":
        statement["Resource"] = f"arn:aws:s3:::{bucket}/{below}"
    elif prefix:
        statement["Condition"] = {"StringLike": {"s3:prefix": below}}
    return f"Allow it: {json.dumps(statement)}."


# Amazon's and every compatible server. `Storage` tries whether one honours `If-None-Match: *`, which `create` sends.
S3 = Cloud(
    schemes=("s3", "s3a"),
    environment=("AWS_",),
    keys="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    address=_s3_address,
    open=_open_s3,
    file_system=_s3_files,
    largest_copy=5 * 10**9,
    words=protocol.StoreMessages(
        no_container=("NoSuchBucket", "bucket does not exist"),
        no_credentials=("NoCredentials", "PartialCredentials"),
        credentials="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a Secret in resources.secret.",
        endpoint="AWS_ENDPOINT_URL",
        own_endpoint="AWS's own endpoint",
        cause=_s3_cause,
        allow=_s3_allow,
    ),
)


def _google_address(uri: str) -> str:
    return _endpoint(uri, "GOOGLE_BASE_URL") or "https://storage.googleapis.com"


def _google_allow(right: str, root: str) -> str:
    rights = {"read": "get", "write": "create", "list": "list", "remove": "delete"}
    return f"Grant storage.objects.{rights[right]} on the bucket {root.partition('/')[0]}."


# Credentials are those of `GOOGLE_SERVICE_ACCOUNT_KEY`, `GOOGLE_SERVICE_ACCOUNT` or `GOOGLE_APPLICATION_CREDENTIALS`,
# else gcloud's own or the machine's service account. Put-if-absent is `x-goog-if-generation-match: 0`.
GOOGLE = Cloud(
    schemes=("gs",),
    environment=("GOOGLE_",),
    keys="GOOGLE_APPLICATION_CREDENTIALS",
    address=_google_address,
    open=lambda uri, bucket: GCSStore(
        bucket, client_options=client_options(_google_address(uri)), retry_config=RETRIES
    ),
    file_system=lambda address: _obstore_files("gs", address),
    create_is_certain=True,
    largest_copy=5 * 10**12,
    words=protocol.StoreMessages(
        no_container=("NoSuchBucket", "bucket does not exist"),
        no_credentials=("Error performing token request",),
        bad_credentials=("service account file",),
        credentials="Set GOOGLE_APPLICATION_CREDENTIALS, or name a key for GOOGLE_SERVICE_ACCOUNT_KEY in "
        "resources.secret_env.",
        endpoint="GOOGLE_BASE_URL",
        own_endpoint="Google's own endpoint",
        allow=_google_allow,
    ),
)


def _azure_address(uri: str) -> str:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "account")
    return _endpoint(uri, "AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT") or f"https://{account}.blob.core.windows.net"


def _azure_cause(answer: protocol.ServerAnswer) -> tuple[str, str] | None:
    detail = answer.fields.get("AuthenticationErrorDetail", "") if answer.code == "AuthenticationFailed" else ""
    if "Signed expiry time" in detail:
        return "the shared access signature has expired", "Set a new one in AZURE_STORAGE_SAS_KEY."
    if "too old" in detail:
        return "the clock of this machine is more than 15 minutes off", "Set the clock by NTP."
    return None


def _azure_allow(right: str, root: str) -> str:
    role = "Reader" if right in ("read", "list") else "Contributor"
    letters = {"read": "r", "write": "cw", "list": "l", "remove": "d"}[right]
    return f"Grant the role Storage Blob Data {role}, or a shared access signature with {letters!r} in its sp."


# Blobs of one container, in the account `AZURE_STORAGE_ACCOUNT_NAME`. Credentials are its key, a shared access
# signature, a service principal or a workload's identity, by the variables that obstore reads. Put-if-absent is
# `If-None-Match: *`.
AZURE = Cloud(
    schemes=("az",),
    environment=("AZURE_",),
    keys="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    address=_azure_address,
    open=lambda uri, bucket: AzureStore(
        bucket, client_options=client_options(_azure_address(uri)), retry_config=RETRIES
    ),
    file_system=lambda address: _obstore_files("az", address),
    create_is_certain=True,
    words=protocol.StoreMessages(
        container="container",
        no_container=("ContainerNotFound", "container does not exist"),
        no_credentials=("Error performing token request", "Account must be specified"),
        bad_credentials=("Invalid Access Key",),
        credentials="Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or name a key for the latter in "
        "resources.secret_env.",
        endpoint="AZURE_STORAGE_ENDPOINT",
        own_endpoint="Azure's own endpoint",
        cause=_azure_cause,
        allow=_azure_allow,
    ),
)

CLOUDS = {scheme: cloud for cloud in (S3, GOOGLE, AZURE) for scheme in cloud.schemes}
SCHEMES = tuple(dict.fromkeys(cloud.schemes[0] for cloud in CLOUDS.values()))  # as Baton writes them
# Prefixes of the variables with a store's endpoint and credentials.
ENVIRONMENT = tuple(dict.fromkeys(prefix for cloud in CLOUDS.values() for prefix in cloud.environment))
# Lists of addresses for messages and help: `s3://, gs:// or az://`, and those that rows are read from.
ANY_BUCKET = f"{'://, '.join(SCHEMES[:-1])}:// or {SCHEMES[-1]}://"
ANY_SOURCE = f"{'://, '.join(SCHEMES)}:// or hf://"


def cloud_of(uri: str) -> Cloud | None:
    """Returns the cloud of a store; None for a folder or another client's address."""
    return CLOUDS.get(uri.partition("://")[0])


def environment_of(uri: str) -> tuple[str, ...]:
    """Returns the prefixes of the variables with a store's credentials; none for a folder."""
    cloud = cloud_of(uri)
    return cloud.environment if cloud else ()
