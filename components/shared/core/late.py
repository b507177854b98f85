"""What stands for an object of a package that is not loaded."""

from __future__ import annotations

from typing import Any


class Late:
    """Stands for an object, and loads it when it is looked into.

    Attributes:
        resolved: What it stands for.
    """

    resolved: Any

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.resolved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.resolved, name)

    def __eq__(self, other: object) -> bool:
        # By `type`: `isinstance` asks for `__class__`, which loads.
        return bool(self.resolved == (other.resolved if issubclass(type(other), Late) else other))  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.resolved)

    def __repr__(self) -> str:
        return repr(self.resolved)
