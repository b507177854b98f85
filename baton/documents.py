"""JSON documents with a type: one reader, one message for an unknown version, the same JSON written back."""

import json
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from baton.errors import DamagedError, FormatError

Json = dict[str, JsonValue]
# Levels of a document, far more than Baton writes. Python's own limit depends on the caller and is no JSON error.
DEEPEST = 100


def load(data: bytes | str) -> Any:
    """Returns the values of a JSON document from a store; ValueError if it is none, or nested too deep."""
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    level, depth = [document], 0
    while level := [part for node in level for part in _parts(node)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
    return document


def load_object(data: bytes, where: str) -> dict[str, Any]:
    """Returns a JSON object from a store; anything else is a DamagedError."""
    try:
        document = load(data)
    except ValueError as error:
        raise DamagedError(f"{where} is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise DamagedError(f"{where} is a JSON {type(document).__name__}, expected an object.")
    return document


def _parts(node: object) -> Iterable[object]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


class Document(BaseModel):
    """A JSON object in the store."""

    # Keys of a newer or older Baton are kept and written back; absent fields stay absent (`to_json`).
    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True, ser_json_inf_nan="constants")

    VERSION: ClassVar[int] = 1  # the version read; a document without `version` is of version 1

    @classmethod
    def read(cls, data: bytes | object, where: str) -> Self:
        """Reads a document; FormatError if a newer Baton wrote it, DamagedError if it is not this document."""
        try:
            parsed: Any = load(data) if isinstance(data, bytes) else data
            version = parsed.get("version", cls.VERSION)
            if isinstance(version, int) and version > cls.VERSION:
                raise FormatError(
                    f"{where} is of version {version!r}, and this Baton reads version {cls.VERSION}.",
                    remedy="Use the Baton that wrote it, or a newer one.",
                )
            if version != cls.VERSION:
                raise DamagedError(f"{where} is of version {version!r}, expected {cls.VERSION}.")
            return cls.model_validate(parsed)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors())
            raise DamagedError(f"{where} is not readable: {'; '.join(lines)}.") from None
        except (ValueError, AttributeError) as error:
            raise DamagedError(f"{where} is not a JSON object: {error}.") from None

    def to_json(self) -> Json:
        """Returns plain values, set or read, without defaults."""
        try:
            return self.model_dump(mode="json", exclude_unset=True)
        except UnicodeEncodeError as error:
            raise DamagedError(f"{type(self).__name__} cannot be written as it was read: {error}.") from None


class NamedDocument(Document):
    """A document in the folder of a run or sweep; `{}` in its name is the key of one of several."""

    NAME: ClassVar[str]

    def __init_subclass__(cls, name: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.NAME = name

    @classmethod
    def file_name(cls, *key: int | str) -> str:
        return cls.NAME.format(*key)
