"""Checks that look at all rows together: duplicates, near duplicates, and training rows near a held-out row."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

import numpy as np

from baton.components.data_split.quality import near
from baton.components.data_split.quality.texts import Row, learned
from baton.components.shared.recipe import Quality

SIDES = ("train", "eval", "test")
CHECKS = ("duplicates", "leakage", "near_duplicates")
"""In the order in which they drop rows. Leakage is before near duplicates: the row that these keep must not be one that
leakage takes away."""
NONE = -1


class SetChecks:
    """Remembers rows, and finds those that are like another.

    Args:
        quality: Settings.
        scratch: Folder for what does not belong in memory.
    """

    def __init__(self, quality: Quality, scratch: str) -> None:
        self._quality = quality
        self._is_on = {check: getattr(quality, check) != "off" for check in CHECKS}
        self._signatures = near.Signatures(f"{scratch}/signatures")
        self._content = array("Q")
        self._sides = array("B")
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._file = array("I")
        self._line = array("Q")

    def add(self, content: bytes, row: Row, side: str, file: str, line: int) -> int:
        """Remembers a row that is written.

        Args:
            content: The row as it is written.
            row: The row.
            side: Its side.
            file: Address of the file that it came from.
            line: Its line there.

        Returns:
            Hash of the content, 64 bits: two of a million rows share one with probability 3e-8.
        """
        hashed = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
        self._content.append(hashed)
        self._sides.append(SIDES.index(side))
        if file not in self._files:
            self._files[file] = len(self._names)
            self._names.append(file)
        self._file.append(self._files[file])
        self._line.append(line)
        if self._is_on["leakage"] or self._is_on["near_duplicates"]:
            self._signatures.add(learned(row))
        return hashed

    def where(self, row: int) -> tuple[str, int]:
        """Returns file and line of a row, by its number."""
        return self._names[self._file[row]], self._line[row]

    def side(self, row: int) -> str:
        """Returns the side of a row."""
        return SIDES[self._sides[row]]

    def find(self) -> dict[str, np.ndarray]:
        """Returns for each check that is on the row that each row is like, or -1.

        The result does not depend on the order of the rows, but for which of several equal rows is the first. Of rows
        that are near each other the one with the smallest hash stays, and every other is near one that stays.
        """
        content = np.frombuffer(self._content, dtype=np.uint64)
        sides = np.frombuffer(self._sides, dtype=np.uint8)
        first = _first_equal(content, sides)
        partners: dict[str, np.ndarray] = {}
        if self._is_on["duplicates"]:
            partners["duplicates"] = np.where(first == np.arange(len(first)), NONE, first)
        signatures = self._signatures.rows()
        if not len(signatures):
            return partners
        neighbours = near.Neighbours(signatures, self._quality.near_duplicate_threshold)
        candidates = neighbours.candidates()
        candidates = candidates[first[candidates] == candidates]
        candidates = candidates[np.argsort(content[candidates], kind="stable")]
        if self._is_on["leakage"]:
            held_out = candidates[sides[candidates] != 0]
            asking = candidates[sides[candidates] == 0]
            partners["leakage"] = _spread(neighbours.pairs(_each(held_out), _each(asking), grow=False), first)
        if self._is_on["near_duplicates"]:
            if self._quality.leakage == "fix":
                candidates = candidates[partners["leakage"][candidates] == NONE]
            by_side = [candidates[sides[candidates] == number] for number in range(len(SIDES))]
            pairs = (pair for rows in by_side for pair in neighbours.pairs(iter(()), _each(rows), grow=True))
            partners["near_duplicates"] = _spread(pairs, first)
        return partners


def _first_equal(content: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Returns for each row the first of its side with the same content."""
    order = np.lexsort((sides, content))  # stable: equal rows stay in the order in which they were added
    if not len(order):
        return order
    changes = (np.diff(content[order]) != 0) | (np.diff(sides[order]) != 0)
    begins = np.maximum.accumulate(np.where(np.r_[True, changes], np.arange(len(order)), 0))
    first = np.empty_like(order)
    first[order] = order[begins]
    return first


def _spread(pairs: Iterator[tuple[int, int]], first: np.ndarray) -> np.ndarray:
    """Returns the partner of each row, that of its first equal one included."""
    partners = np.full(len(first), NONE, dtype=np.int64)
    for row, partner in pairs:
        partners[row] = partner
    return partners[first]


def _each(rows: np.ndarray) -> Iterator[int]:
    return (int(row) for row in rows)
