"""What a store's client library says, turned into what a person can act on; and what is worth another try."""

from __future__ import annotations

import errno
import os
import re

from components.shared.errors import BatonError, StoreError, UnavailableError

NO_BUCKET = ("NoSuchBucket", "bucket does not exist")
_DENIED = re.compile(r"\b40[13] (?:Forbidden|Unauthorized)|\b403\b|InvalidAccessKeyId|SignatureDoesNot|AccessDenied")
_UNREACHED = re.compile(r"EndpointConnection|ConnectTimeout|Could not connect|ConnectionRefused|error sending request")
_TRANSIENT = re.compile(
    r"status code: (?:5\d\d|429|408)|SlowDown|RequestTimeout|InternalError|HTTP error|timed out|Timeout|non-partial"
    r"|ConnectionReset|ConnectionError|IncompleteRead|Interrupted"
)
_PERMANENT = re.compile(r"status code: 501|NotImplemented")


def is_missing(error: BaseException) -> bool:
    """Tells whether an object is missing, and not its bucket."""
    return isinstance(error, FileNotFoundError) and not any(word in str(error) for word in NO_BUCKET)


def explain(error: Exception, uri: str) -> BatonError:
    """Returns the error to raise in place of a client library's."""
    kind = type(error).__name__
    # obstore appends its inner structure; the line before says it all.
    text = " ".join(str(error).partition("Debug source:")[0].split())
    known = f"{kind} {text} {error}"
    if any(word in known for word in NO_BUCKET):
        return StoreError(f"store {uri!r}: the bucket does not exist.", remedy="Create it first.")
    if "NoCredentials" in known or "PartialCredentials" in known:
        return StoreError(
            f"store {uri!r}: no credentials found.",
            remedy="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a Secret in resources.secret.",
        )
    if isinstance(error, PermissionError) or kind == "PermissionDeniedError" or _DENIED.search(known):
        return StoreError(
            f"store {uri!r}: access denied ({_reason(text)}).", remedy="Check the credentials and their rights."
        )
    if _UNREACHED.search(known):
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "AWS's own endpoint")
        return UnavailableError(
            f"store {uri!r}: {endpoint} cannot be reached.", remedy="Check AWS_ENDPOINT_URL and the network."
        )
    if _TRANSIENT.search(known) and not _PERMANENT.search(known):
        return UnavailableError(f"store {uri!r} does not answer as it should: {_reason(text)}.", remedy="Try later.")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return StoreError(f"store {uri!r} is full.", remedy="Make room, or let chunks.keep hold fewer checkpoints.")
    return StoreError(f"store {uri!r}: {kind}: {text}.", remedy="Use a folder or s3://bucket that can be written to.")


def _reason(text: str) -> str:
    """Returns the code and message in an S3 answer, or all of a shorter text."""
    code = re.search(r"<Code>([^<]*)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    return text.rstrip(".: ")
