"""A recipe in the making, with the fate of every key of the file it is made from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from baton.errors import UserError
from baton.recipe.load import set_path

Document = dict[str, Any]

EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values that ask for nothing."""


class KeyResult(StrEnum):
    """Fate of a key that is not simply carried over."""

    unsupported = "not carried over"
    changed = "carried over, with a difference"
    elsewhere = "said elsewhere, with no effect on what is learned"
    not_needed = "not needed"


@dataclass(frozen=True)
class Remark:
    """Fate of one key, for the reader of the recipe; `text` is the reason and the remedy."""

    result: KeyResult
    key: str
    value: object
    text: str


class RecipeDraft:
    """A recipe in the making; relative paths in it start at the folder `target`.

    Each key of the file ends up in exactly one of `carried`, `idle` and, by its first remark, `remarks`.
    """

    def __init__(self, given: Mapping[str, object], *, tool: str, origin: str, target: str) -> None:
        self.given = dict(given)
        self.tool = tool
        self.origin = origin
        self.target = os.path.abspath(target)
        self.document: Document = {}
        self.carried: dict[str, str] = {}
        self.idle: list[str] = []
        self.remarks: list[Remark] = []
        self.assumed: list[str] = []

    def has(self, key: str) -> bool:
        """Tells whether a key is there with a value that asks for something."""
        return self.given.get(key) not in (*EMPTY, False)

    def get(self, key: str, default: object = None) -> Any:
        value = self.given.get(key)
        return default if value is None else value

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys with a prefix that ask for something and are not handled yet."""
        return [key for key in self.given if key.startswith(prefix) and self.has(key) and not self.is_handled(key)]

    def is_handled(self, key: str) -> bool:
        return key in self.carried or key in self.idle or any(remark.key == key for remark in self.remarks)

    def put(self, path: str, value: object, *keys: str) -> None:
        """Sets a value of the recipe, and counts the keys it comes from as carried over."""
        set_path(self.document, path, value)
        self.carry(path, *keys)

    def carry(self, path: str, *keys: str) -> None:
        """Counts keys as carried over to `path`."""
        for key in keys:
            if self.given.get(key) not in EMPTY and not self.is_handled(key):
                self.carried[key] = path

    def peek(self, path: str, default: object = None) -> Any:
        """Returns a value that the recipe has so far."""
        node: Any = self.document
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def assume(self, path: str, value: object) -> None:
        """Sets the other trainer's default of an absent key, where Baton's differs."""
        if self.peek(path) is None:
            self.put(path, value)
            self.assumed.append(f"{path} {value}")

    def unsupported(self, key: str, text: str) -> None:
        self.note(KeyResult.unsupported, key, text)

    def changed(self, key: str, text: str) -> None:
        self.note(KeyResult.changed, key, text)

    def not_needed(self, key: str, text: str) -> None:
        self.note(KeyResult.not_needed, key, text)

    def drop(self, key: str, text: str, result: KeyResult = KeyResult.unsupported) -> None:
        """Notes that a key is not carried over, if it asks for something."""
        self.note(result, key, text) if self.has(key) else self.ignore(key)

    def ignore(self, *keys: str) -> None:
        """Notes that keys ask for nothing, unless they are handled."""
        self.idle += [key for key in keys if key in self.given and not self.is_handled(key)]

    def note(self, result: KeyResult, key: str, text: str) -> None:
        if not any(remark.key == key and remark.text == text for remark in self.remarks):
            self.carried.pop(key, None)
            self.remarks.append(Remark(result, key, self.given.get(key), text))

    def wrong(self, key: str, expected: str, remedy: str | None = None) -> UserError:
        """Returns the error for an impossible value."""
        return UserError(
            f"{self.origin}: {key} is {self.given.get(key)!r}, expected {expected}.",
            remedy=remedy or f"Correct it in the file, or give what {self.tool} accepts.",
        )

    @property
    def folders(self) -> tuple[str, str]:
        """Folders where the other trainer's relative paths may start: the current one, and the file's."""
        return os.getcwd(), os.path.dirname(os.path.abspath(self.origin))

    def relative(self, path: str, *folders: str) -> str:
        """Returns a local path from the recipe's folder, if it exists below one of these."""
        for folder in folders or self.folders:
            found = os.path.abspath(os.path.join(folder, os.path.expanduser(path)))
            if os.path.exists(found):
                near = os.path.relpath(found, self.target)
                return found if near.startswith(os.path.join("..", "..", "..")) else near
        return path
