"""JSON documents with a type: one reader, one message for an unknown version, the same JSON written back."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from baton.components.shared.core.errors import DamagedError, UserError

Json = dict[str, JsonValue]
"""A document as it lies in the store."""


class Document(BaseModel):
    """A JSON object in the store.

    Keys that a newer or older Baton wrote besides are kept and written back; fields that were absent stay absent.
    """

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True, ser_json_inf_nan="constants")

    VERSION: ClassVar[int] = 1
    """What is read; a document without `version` is of version 1."""

    @classmethod
    def read(cls, data: bytes | object, where: str) -> Self:
        """Reads a document.

        Args:
            data: The JSON, as bytes or parsed.
            where: Its address, for messages.

        Raises:
            UserError: another version of Baton wrote it.
            DamagedError: it is not JSON, or not this document.
        """
        try:
            parsed: Any = json.loads(data) if isinstance(data, bytes) else data
            version = parsed.get("version", cls.VERSION)
            if version != cls.VERSION:
                raise UserError(
                    f"{where} is of version {version!r}, and this Baton reads version {cls.VERSION}.",
                    remedy="Use the Baton that wrote it, or a newer one.",
                )
            return cls.model_validate(parsed)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors())
            raise DamagedError(f"{where} is not readable: {'; '.join(lines)}.") from None
        except (ValueError, AttributeError) as error:
            raise DamagedError(f"{where} is not a JSON object: {error}.") from None

    def to_json(self) -> Json:
        """Returns plain values: what was set or read, and no defaults."""
        return self.model_dump(mode="json", exclude_unset=True)


class NamedDocument(Document):
    """A document of a run or a sweep, which lies below its folder."""

    NAME: ClassVar[str]
    """Its path there; `{}` stands for the number or id of one of several."""

    @classmethod
    def file_name(cls, *key: int | str) -> str:
        """Returns the path of a document, of several the one of a key."""
        return cls.NAME.format(*key)
