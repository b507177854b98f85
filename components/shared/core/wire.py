"""Texts on their way through Kubeflow, from a recipe's file to a stage and from one stage to another.

Argo replaces `{{…}}` in any text of a workflow and Kubernetes `$(…)` in a pod's command, and not every database on the
way holds every character. Such texts travel packed, with a digest of what was sent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

from baton.components.shared.core.errors import BatonError

MARK = "baton:zlib:"
"""How a packed text begins; digest and content follow."""
READ_BY_OTHERS = ("{{", "}}", "$(", "${")


def pack(text: str) -> str:
    """Returns a text in base64 of its compressed bytes, behind the beginning of their SHA-256."""
    data = text.encode("utf-8", "surrogatepass")
    return f"{MARK}{_digest(data)}:{base64.b64encode(zlib.compress(data, 9)).decode('ascii')}"


def sent(text: str) -> str:
    """Returns a text as it is where it arrives so, for people who read it on Kubeflow's page, else packed."""
    arrives = text.isprintable() and max(text, default="") < "\U00010000" and not text.startswith(MARK)
    return text if arrives and not any(each in text for each in READ_BY_OTHERS) else pack(text)


def received(value: Any) -> Any:
    """Returns a value of a stage's inputs with all texts in it as they were sent.

    Raises:
        BatonError: a text has been changed on its way.
    """
    if isinstance(value, Mapping):
        return {key: received(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [received(inner) for inner in value]
    if not isinstance(value, str) or not value.startswith(MARK):
        return value
    digest, _, content = value.removeprefix(MARK).partition(":")
    try:
        packed = base64.b64decode(content, validate=True)
        data = zlib.decompress(packed)
        if base64.b64encode(packed).decode("ascii") == content and _digest(data) == digest:
            return data.decode("utf-8", "surrogatepass")
        arrived = f"its digest is {_digest(data)}"
    except (binascii.Error, zlib.error, ValueError) as error:
        arrived = f"it cannot be unpacked ({error})"
    raise BatonError(
        f"A text was changed between the compiled pipeline and this stage: {arrived}, expected {digest!r}.",
        remedy="Submit the recipe again; if that repeats, see what rewrites the workflow's parameters in the cluster.",
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
