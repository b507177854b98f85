"""Reference to a run, passed from stage to stage, and texts packed for their way through Kubeflow.

Argo replaces `{{…}}` in any text and Kubernetes `$(…)` in a command, and some databases lose characters. So texts
travel compressed, in base64, with a digest of the original.
"""

import base64
import binascii
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from baton.errors import BatonError


@dataclass(frozen=True)
class RunRef:
    """A stage's run, as text `URI#MADE.REBUILDS`: all that Kubeflow's cache has to tell apart.

    No checkpoint, time or id of Kubeflow's: they differ between submissions, so cached stages would run again. Stages
    read everything else from the store.
    """

    run_uri: str
    made: str = ""  # creation time of the run: one deleted and begun again under its name is another run
    rebuilds: int = 0  # times that a finished stage's objects were found missing, or the run's end was moved

    def __str__(self) -> str:
        return f"{self.run_uri}#{self.made}.{self.rebuilds}" if self.made else self.run_uri

    @classmethod
    def read(cls, text: str) -> Self:
        uri, mark, rest = text.rpartition("#")
        made, _, rebuilds = rest.rpartition(".")
        return cls(uri, made, int(rebuilds)) if mark and rebuilds.isdigit() else cls(text)


PACKED = "baton:zlib:"  # beginning of a packed text; digest and content follow
READ_BY_OTHERS = ("{{", "}}", "$(", "${")


def pack_text(text: str) -> str:
    """Returns `PACKED`, the beginning of the text's SHA-256, and its compressed bytes in base64."""
    data = text.encode("utf-8", "surrogatepass")
    return f"{PACKED}{_text_digest(data)}:{base64.b64encode(zlib.compress(data, 9)).decode('ascii')}"


def encode_text(text: str) -> str:
    """Returns a text as it is where it arrives unchanged, readable on Kubeflow's page, else packed."""
    arrives = text.isprintable() and max(text, default="") < "\U00010000" and not text.startswith(PACKED)
    return text if arrives and not any(each in text for each in READ_BY_OTHERS) else pack_text(text)


def decode_texts(value: Any) -> Any:
    """Returns a stage's input with all texts in it unpacked; one that was changed is a BatonError."""
    if isinstance(value, Mapping):
        return {key: decode_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [decode_texts(inner) for inner in value]
    if not isinstance(value, str) or not value.startswith(PACKED):
        return value
    digest, _, content = value.removeprefix(PACKED).partition(":")
    try:
        packed = base64.b64decode(content, validate=True)
        data = zlib.decompress(packed)
        if base64.b64encode(packed).decode("ascii") == content and _text_digest(data) == digest:
            return data.decode("utf-8", "surrogatepass")
        arrived = f"its digest is {_text_digest(data)}"
    except (binascii.Error, zlib.error, ValueError) as error:
        arrived = f"it cannot be unpacked ({error})"
    raise BatonError(
        f"A text was changed between the compiled pipeline and this stage: {arrived}, expected {digest!r}.",
        remedy="Submit the recipe again; if that repeats, see what rewrites the workflow's parameters in the cluster.",
    )


def _text_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
