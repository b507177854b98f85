"""Protocol of a store, under which a folder and a cloud's objects behave alike, and translation of its errors.

Errors of a client's library become errors with a remedy, which tell whether to try again.
"""

import errno
import html
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from baton.errors import AbsentError, BatonError, StoreError, UnavailableError
from baton.machine import Proxy

BLOCK = 4 * 1024 * 1024  # bytes read at a time while an object is hashed on its way
OWN = ".baton-"  # beginning of the names of temporary objects, which listings leave out


def below(root: str, path: str) -> str:
    """Returns the file system's name of an object; StoreError for one outside the store."""
    # Documents in the store name others, and may be forged. Clouds' clients refuse such a name too.
    if ".." in path.split("/"):
        raise StoreError(
            f"{path!r} leads out of the store {root}.",
            remedy="Find out who wrote the document that names it; nothing of Baton's does.",
        )
    return f"{root}/{path}".rstrip("/")


class ObjectInfo(NamedTuple):
    size: int
    modified: datetime  # by the store's clock


class ObjectStore(Protocol):
    """Objects below one URI, by paths relative to it.

    Operations raise the client library's own errors, which `explain` translates; a missing object is a
    `FileNotFoundError`. A client is made without asking the store or looking for credentials: both wait for the first
    operation. `open_store` of `baton.store.storage` knows which client is whose.
    """

    @property
    def uri(self) -> str:
        """Address for people and other processes; never with credentials."""

    @property
    def root(self) -> str:
        """The address without its scheme: an absolute folder, or `bucket/prefix`."""

    @property
    def is_local(self) -> bool:
        """Whether objects are files of this machine, below `root`."""

    @property
    def create_is_certain(self) -> bool:
        """Whether every server of this kind lets one of two creators win; else `Storage` tries it once."""

    def read(self, path: str) -> bytes:
        """Returns a whole object."""

    def write(self, path: str, data: bytes) -> None:
        """Writes a small object, or replaces it; readers see the old or the new one."""

    def create(self, path: str, data: bytes) -> bool:
        """Put-if-absent: writes a small object unless there is one, and tells whether it did."""

    def size(self, path: str) -> int | None:
        """Returns an object's bytes, None where there is no object."""

    def list(self, path: str) -> list[str]:
        """Returns the names directly below a path, in any order."""

    def find(self, path: str) -> dict[str, ObjectInfo]:
        """Returns all objects at any depth below a path, by their paths relative to it."""

    def remove(self, path: str) -> None:
        """Removes an object, if it is there."""

    def tidy(self, path: str) -> None:
        """Removes an empty folder, where the store has such."""

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        """Sends a file; `seen` is called with its bytes in order, and its error ends the upload."""

    def copy(self, source: str, path: str, size: int) -> bool:
        """Copies an object inside the store, where it can, and tells whether it did; both may share their bytes."""

    def download(self, path: str, local_path: str, size: int) -> str:
        """Fetches an object of known size to a file and returns the SHA-256 of its bytes."""

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields an object's bytes in order."""

    def explain(self, error: Exception, path: str | None = None) -> Exception:
        """Translates a client library's error; `path` was read past this client, and may be looked for by a listing."""


USABLE = "Use a folder or a bucket that can be written to."
_SIGNATURE = re.compile(r"((?:sig|X-Amz-Signature|X-Goog-Signature)=)[^&\s\"']+")
_DENIED = re.compile(
    r"\b40[13] (?:Forbidden|Unauthorized)|(?<![:.\d])403\b(?!\.\d)"  # "in 403.09ms" is no answer
    r"|InvalidAccessKeyId|SignatureDoesNot|AccessDenied|AuthenticationFailed"
)
_UNREACHED = re.compile(r"EndpointConnection|ConnectTimeout|Could not connect|ConnectionRefused|error sending request")
_TRANSIENT = re.compile(
    r"status code: (?:5\d\d|429|408)|SlowDown|RequestTimeout|InternalError|HTTP error|timed out|Timeout|non-partial"
    r"|ConnectionReset|ConnectionError|IncompleteRead|Interrupted"
)
_BUSY = re.compile(r"status code: (?:5\d\d|429)")
# A write that finds nothing: no object is missing, but the bucket, or an upload in parts that was cleaned up.
_NOWHERE = re.compile(r"Error performing (?:PUT|POST) (?!.*NoSuchUpload)", re.DOTALL)
_UNSUPPORTED = re.compile(r"status code: 501|NotImplemented")
_REQUEST = re.compile(r"Error performing ([A-Z]+) (\S+)")
_STATUS = re.compile(r"status code: (\d+)")
_FIELD = re.compile(r"<(\w+)>([^<]*)</\1>")
_MOVED = "redirect without LOCATION"  # obstore's message for a redirect to another region; the answer's own is lost
_NOT_AUTHORIZED = re.compile(r"not authorized to perform: (\S+?)(?: on resource: \W*?(arn:[^\s\"']+))?(?:[\s\"']|$)")


class UnknownRequestError(StoreError):
    """The server does not know this request; a retry is in vain."""


class DeniedError(StoreError):
    """The credentials are valid but lack the right to this request."""


@dataclass(frozen=True)
class ServerAnswer:
    """A server's answer, as far as a client's error tells."""

    status: int = 0  # of HTTP; 0 where there is none
    code: str = ""  # the server's own; empty for a `HEAD`, whose answer has no body
    fields: Mapping[str, str] = field(default_factory=dict)  # `Message`, `Region`, `ServerTime`, …
    request: str = ""  # for people
    right: str = ""  # right that the request needs: `read`, `write`, `list` or `remove`; empty where it is not known

    @property
    def message(self) -> str:
        return " ".join(self.fields.get("Message", "").split())

    @property
    def may_be_missing(self) -> bool:
        """Whether a listing can tell more: why a `HEAD` was refused, or that there is no such object."""
        return (self.status == 403 and self.code in ("", "AccessDenied")) or (self.status == 400 and not self.code)


def answer(error: BaseException) -> ServerAnswer:
    """Returns the server's answer in an error of obstore, botocore or s3fs."""
    # obstore's own errors are not followed: raised while another error is handled, they have that one as their context.
    cause: BaseException | None = None if type(error).__module__.startswith("obstore") else error
    while cause is not None and not isinstance(getattr(cause, "response", None), dict):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return _botocores(getattr(cause, "operation_name", ""), cause.response)  # type: ignore[attr-defined]
    text = str(error).partition("Debug source:")[0]
    request, status = _REQUEST.search(text), _STATUS.search(text)
    fields = {name: html.unescape(value) for name, value in _FIELD.findall(text)}
    code = fields.get("Code", "")
    method, url = (request[1], request[2]) if request else ("", "")
    if failed := re.search(r"DeleteObjects request failed for key (.*): (.*) \(code: (\w+)\)", text):
        method, url, code, fields = "DELETE", failed[1], failed[3], {"Message": failed[2]}
    right = {"GET": "read", "HEAD": "read", "DELETE": "remove"}.get(method, "write" if method else "")
    if "list request" in text:
        right = "list"
    elif method == "POST" and url.endswith("?delete"):
        right = "remove"
    if _MOVED in text:
        code = "PermanentRedirect"
    return ServerAnswer(int(status[1]) if status else 0, code, fields, f"{method} {urlsplit(url).path}".strip(), right)


def _botocores(operation: str, response: Mapping[str, Mapping[str, object]]) -> ServerAnswer:
    fields = {name: str(value) for name, value in response.get("Error", {}).items()}
    about = response.get("ResponseMetadata", {})
    headers = about.get("HTTPHeaders")
    if isinstance(headers, Mapping) and headers.get("x-amz-bucket-region"):
        fields.setdefault("Region", str(headers["x-amz-bucket-region"]))
    status, code = int(str(about.get("HTTPStatusCode", 0))), fields.get("Code", "")
    if status == 301:
        code = "PermanentRedirect"
    beginnings = {"List": "list", "HeadBucket": "list", "Delete": "remove", "Get": "read", "Head": "read"}
    right = next((right for beginning, right in beginnings.items() if operation.startswith(beginning)), "write")
    return ServerAnswer(status, "" if code.isdigit() else code, fields, operation, right)


@dataclass(frozen=True, kw_only=True)
class StoreMessages:
    """Names of one kind of store's errors, as parts of their messages, and the remedies."""

    no_container: tuple[str, ...] = ()  # the bucket itself is missing
    no_credentials: tuple[str, ...] = ()
    bad_credentials: tuple[str, ...] = ()  # the credentials cannot be read
    credentials: str = ""  # remedy where there are none
    endpoint: str = ""  # variable with the server's address
    own_endpoint: str = "the server"  # server where that variable is not set
    container: str = "bucket"  # the store's word for a bucket
    # Reason and remedy of a refusal that has nothing to do with rights.
    cause: Callable[[ServerAnswer], tuple[str, str] | None] = lambda answer: None
    allow: Callable[[str, str], str] = lambda right, root: ""  # remedy for a right that is missing on `bucket/prefix`


def explain(error: Exception, uri: str, words: StoreMessages, proxy: Proxy | None = None) -> Exception:
    """Returns the error to raise in place of a client library's; a missing object stays a FileNotFoundError."""
    if isinstance(error, BatonError):
        return error
    found = answer(error)
    kind = type(error).__name__
    everything = without_signature(str(error))
    # obstore appends its inner structure; the previous line is enough.
    text = " ".join(everything.partition("Debug source:")[0].split())
    known = f"{kind} {text} {everything}"
    if found.code and found.code not in known:  # s3fs keeps the message alone
        known += f" {found.code} status code: {found.status}"
    through = f" through the proxy {proxy}" if proxy else ""
    is_missing = isinstance(error, FileNotFoundError)
    if any(part in known for part in words.no_container) or (is_missing and _NOWHERE.search(everything)):
        return AbsentError(f"store {uri!r}: the {words.container} does not exist.", remedy="Create it first.")
    if is_missing:
        return FileNotFoundError(text)
    # A pod's metadata server may be busy for a moment; that one is asked again.
    if any(part in known for part in words.no_credentials) and not _BUSY.search(known):
        return no_credentials(uri, words)
    if any(part in known for part in words.bad_credentials):
        return StoreError(f"store {uri!r}: the credentials cannot be used ({text}).", remedy=words.credentials)
    if found.status == 407:
        return StoreError(
            f"store {uri!r}: the proxy {proxy or ''} asks for a user and a password (407).",
            remedy="Write them into its address, http://USER:PASSWORD@HOST:PORT, or name the store's host in NO_PROXY.",
        )
    if cause := words.cause(found):
        reason = _reason(text, found)
        return StoreError(f"store {uri!r}: {cause[0]}{f' ({reason})' if found.code else ''}.", remedy=cause[1])
    # Others than 401 and 403 are a PermissionError to s3fs too, MethodNotAllowed for one.
    is_refused = isinstance(error, PermissionError) and found.status in (0, 401, 403)
    if is_refused or kind == "PermissionDeniedError" or _DENIED.search(known):
        return denied(found, uri, words, _reason(text, found) + through)
    if _UNREACHED.search(known):
        endpoint = os.environ.get(words.endpoint, words.own_endpoint)
        remedy = f"Check {words.endpoint} and the network." if words.endpoint else "Check the network."
        if proxy:
            remedy = f"Check {proxy.variable}, or name the host in NO_PROXY. {remedy}"
        return UnavailableError(f"store {uri!r}: {endpoint} cannot be reached{through}.", remedy=remedy)
    if _UNSUPPORTED.search(known):
        return UnknownRequestError(f"store {uri!r}: {kind}: {text}.", remedy=USABLE)
    if _TRANSIENT.search(known):
        return UnavailableError(
            f"store {uri!r} does not answer as it should{through}: {_reason(text, found)}.", remedy="Try later."
        )
    if isinstance(error, UnicodeEncodeError):
        remedy = "Set PYTHONUTF8=1 or a UTF-8 locale, such as LC_ALL=C.UTF-8."
        return StoreError(f"store {uri!r}: this process's locale cannot name it ({text}).", remedy=remedy)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StoreError(f"store {uri!r} is full.", remedy="Make room, or let chunks.keep hold fewer checkpoints.")
    if found.code or found.status:
        return StoreError(
            f"store {uri!r} refuses {found.request or 'a request'}{through}: {_reason(text, found)}.",
            remedy="Look for that answer in the documentation of the store.",
        )
    return StoreError(f"store {uri!r}: {kind}: {text}.", remedy=USABLE)


def denied(
    found: ServerAnswer, uri: str, words: StoreMessages, reason: str, *, or_missing: bool = False
) -> DeniedError:
    """Returns the error of a request for which its user lacks the right."""
    root = uri.partition("://")[2]
    said = _NOT_AUTHORIZED.search(found.message)
    if "explicit deny" in found.message:
        remedy = "A policy denies it explicitly: take that statement back."
    elif said and not said[1].startswith("s3:"):  # a key's policy, for example
        remedy = f"Allow {said[1]}{f' on {said[2]}' if said[2] else ''}."
    else:
        rights = (found.right, "list") if or_missing else (found.right,)
        statements = [each for right in rights if right and (each := words.allow(right, root))]
        remedy = " ".join(statements) or "Check the credentials and their rights."
    perhaps = "; it may also be missing, which only a listing tells" if or_missing else ""
    request = f" for {found.request}" if found.request else ""
    return DeniedError(f"store {uri!r}: access denied ({reason}){request}{perhaps}.", remedy=remedy)


def no_credentials(uri: str, words: StoreMessages) -> BatonError:
    """Returns the error of a store without credentials."""
    return StoreError(f"store {uri!r}: no credentials found.", remedy=words.credentials)


def without_signature(text: str) -> str:
    """Returns a message without signatures, which make an address a credential."""
    return _SIGNATURE.sub(r"\1…", text)


def _reason(text: str, found: ServerAnswer) -> str:
    if found.code and found.message:
        return f"{found.code}: {found.message.rstrip('.')}"
    if found.code or found.status:
        return found.code or str(found.status)
    return text.rstrip(".: ")
