"""Translates errors of a store's client library into ones that a person can act on, and tells which to retry."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass

from baton.components.shared.core.errors import AbsentError, BatonError, StoreError, UnavailableError

USABLE = "Use a folder or a bucket (s3://, gs://, az://) that can be written to."
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
_NOWHERE = re.compile(r"Error performing (?:PUT|POST) (?!.*NoSuchUpload)", re.DOTALL)
"""A write that finds nothing: not an object is missing, but the bucket; or an upload in parts that was cleaned up."""
_UNSUPPORTED = re.compile(r"status code: 501|NotImplemented")


class UnsupportedError(StoreError):
    """The server does not know this request, and will not with another try."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """Names of one kind of store's errors, and their remedies.

    Attributes:
        no_container: Parts of a message that say that the bucket itself is missing.
        no_credentials: Parts of a message that say that no credentials were found.
        bad_credentials: Parts of a message that say that they are none.
        credentials: What to set where there are none.
        endpoint: The variable with the server's address.
        own_endpoint: The server where that variable is not set.
        container: What the store calls a bucket.
    """

    no_container: tuple[str, ...] = ()
    no_credentials: tuple[str, ...] = ()
    bad_credentials: tuple[str, ...] = ()
    credentials: str = ""
    endpoint: str = ""
    own_endpoint: str = "the server"
    container: str = "bucket"


def explain(error: Exception, uri: str, words: Words) -> Exception:
    """Returns the error to raise in place of a client library's; a missing object stays a FileNotFoundError."""
    kind = type(error).__name__
    everything = without_signature(str(error))
    # obstore appends its inner structure; the line before says it all.
    text = " ".join(everything.partition("Debug source:")[0].split())
    known = f"{kind} {text} {everything}"
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
    if isinstance(error, PermissionError) or kind == "PermissionDeniedError" or _DENIED.search(known):
        return StoreError(
            f"store {uri!r}: access denied ({_reason(text)}).", remedy="Check the credentials and their rights."
        )
    if _UNREACHED.search(known):
        endpoint = os.environ.get(words.endpoint, words.own_endpoint)
        remedy = f"Check {words.endpoint} and the network." if words.endpoint else "Check the network."
        return UnavailableError(f"store {uri!r}: {endpoint} cannot be reached.", remedy=remedy)
    if _UNSUPPORTED.search(known):
        return UnsupportedError(f"store {uri!r}: {kind}: {text}.", remedy=USABLE)
    if _TRANSIENT.search(known):
        return UnavailableError(f"store {uri!r} does not answer as it should: {_reason(text)}.", remedy="Try later.")
    if isinstance(error, UnicodeEncodeError):
        remedy = "Set PYTHONUTF8=1 or a UTF-8 locale, such as LC_ALL=C.UTF-8."
        return StoreError(f"store {uri!r}: this process's locale cannot name it ({text}).", remedy=remedy)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StoreError(f"store {uri!r} is full.", remedy="Make room, or let chunks.keep hold fewer checkpoints.")
    return StoreError(f"store {uri!r}: {kind}: {text}.", remedy=USABLE)


def no_credentials(uri: str, words: Words) -> BatonError:
    """Returns the error of a store for which no credentials were found."""
    return StoreError(f"store {uri!r}: no credentials found.", remedy=words.credentials)


def without_signature(text: str) -> str:
    """Returns a message without the signatures that make an address in it a credential."""
    return _SIGNATURE.sub(r"\1…", text)


def _reason(text: str) -> str:
    """Returns the code and message in a server's answer, or all of a shorter text."""
    code = re.search(r"<Code>([^<]*)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    return text.rstrip(".: ")
