"""Credentials in a compiled pipeline: found by the names of fields and variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_CREDENTIAL_ENDINGS = ("SECRET", "TOKEN", "PASSWORD", "APIKEY", "ACCESSKEY")
_REFERENCE_WORDS = frozenset({"NAME", "FILE", "PATH", "REF"})
_REFERENCE_FIELDS = frozenset({"key", "secretKey", "configMapKey", "topologyKey", "outputParameterKey"})
"""The schema's own fields that sound like credentials and only refer to something."""


def is_credential_name(name: str) -> bool:
    """Tells whether a name looks like that of a credential's value.

    `HF_TOKEN`, `secretKey` and `PGPASSWORD` do. `TOKENIZERS_PARALLELISM` does not, and neither
    does what names or locates a secret: `secretName`, `HF_TOKEN_PATH`.
    """
    words = re.split(r"[^A-Z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper())
    if words[-1] in _REFERENCE_WORDS:
        return False
    return any(word == "KEY" or word.endswith(_CREDENTIAL_ENDINGS) for word in words)


def literal_credentials(node: object, place: str) -> Iterator[str]:
    """Finds literals under names a user chose; the schema's own names only refer to secrets."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = f"{place}.{key}".lstrip(".")
            is_literal = isinstance(value, str | int | float) and bool(value)
            if is_literal and is_credential_name(str(key)) and key not in _REFERENCE_FIELDS:
                yield literal_credential(where)
            yield from literal_credentials(value, where)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from literal_credentials(value, f"{place}[{index}]")


def literal_credential(place: str) -> str:
    """Says what is wrong with a credential that is written out."""
    return f"{place}: holds a credential; expected a reference to a Kubernetes secret (use_secret_as_env)."
