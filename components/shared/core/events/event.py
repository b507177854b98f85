"""An event: what a stage tells while it runs, written as its kind and its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, dataclass_transform

KINDS: dict[str, type[Event]] = {}
"""Kind on the wire → its event."""


@dataclass_transform(frozen_default=True)
class Event:
    """Something that a stage tells; each class of it is a frozen dataclass, and `kind` is its name on the wire.

    A field that has a default was not always there, or is not always told: it is left out while it is None.
    """

    kind: str

    def __init_subclass__(cls, kind: str = "") -> None:
        dataclass(frozen=True)(cls)
        if kind:
            cls.kind = kind
            KINDS[kind] = cls

    def fields(self) -> dict[str, Any]:
        """Returns what is written, in its order."""
        optional = type(self)
        return {name: value for name, value in vars(self).items() if value is not None or not hasattr(optional, name)}

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Returns the event with these fields; those that it does not know, another Baton's, are left out.

        Raises:
            TypeError: one is missing that every Baton has written.
        """
        return cls(**{name: fields[name] for name in cls.__match_args__ if name in fields})  # type: ignore[attr-defined]


class Unknown(Event):
    """An event that this Baton does not know, or not with these fields."""

    kind: str
    values: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """Returns what was read."""
        return self.values
