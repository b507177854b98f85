"""Checks of all rows together: duplicates, near duplicates, and training rows near a held-out row.

MinHash estimates the Jaccard similarity of word triples (Broder 1997). Candidates agree in all hashes of a band
(Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4). Signatures take 256 bytes a row in a mapped file, in
16-bit hashes that collide once in 65,536. All else takes some 50 bytes a row and 4 per band.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator

import numpy as np

from baton.data.quality import checks
from baton.data.quality.checks import training_text
from baton.data.rows import SIDES, Record
from baton.recipe.data import QualityChecks

NUM_HASHES = 128
SHINGLE = 3  # words in a row that count as one; with five, one word changed in a row of 50 would take it below 0.85
LONGEST = 100_000  # characters of a row that count; longer ones with the same beginning are alike
BATCH = 50_000  # word triples from which signatures are made at once
SEED = 1
MOST_COMPARED = 64
"""Rows of one bucket that a row is compared with, the newest kept ones: bounds the work where thousands of rows share a
long template."""


def shingles(text: str) -> list[str]:
    """Returns the overlapping word triples of a text; fewer words as one."""
    words = checks.words(text[:LONGEST])
    return [" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))]


def band_rows(threshold: float) -> int:
    """Returns the hashes of a band: the most with which a pair at the threshold is found in 99 of 100 cases.

    A pair of similarity s agrees in at least one of b bands of r hashes with probability 1 - (1 - s^r)^b.
    """
    sizes = (32, 16, 8, 4, 2)
    return next((r for r in sizes if 1 - (1 - threshold**r) ** (NUM_HASHES // r) >= 0.99), 1)


class Signatures:
    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115
        self._waiting: list[list[str]] = []
        self._size = 0

    def add(self, text: str) -> None:
        self._waiting.append(shingles(text))
        self._size += len(self._waiting[-1])
        if self._size >= BATCH:
            self._write()

    def _write(self) -> None:
        from rensa import RMinHash  # type: ignore[import-untyped]

        if self._waiting:
            matrix = RMinHash.digest_matrix_from_token_sets(self._waiting, NUM_HASHES, SEED)
            # Cut to 16 bits, 256 bytes a row: hashes that differ agree there once in 65,536.
            self._file.write(np.array(matrix.to_rows(), dtype=np.uint32).astype("<u2").tobytes())
            self._waiting.clear()
            self._size = 0

    def rows(self) -> np.ndarray:
        """Returns the signatures, of shape (rows, NUM_HASHES); no more can be added."""
        self._write()
        self._file.close()
        if os.path.getsize(self._path) == 0:
            return np.zeros((0, NUM_HASHES), dtype="<u2")
        return np.memmap(self._path, dtype="<u2", mode="r").reshape(-1, NUM_HASHES)


class LSHIndex:
    """Finds rows whose signatures are similar to at least the threshold."""

    def __init__(self, signatures: np.ndarray, threshold: float) -> None:
        self._signatures = signatures
        self._least = int(np.ceil(threshold * NUM_HASHES))
        self._buckets = _buckets(signatures, band_rows(threshold))

    def candidates(self) -> np.ndarray:
        """Returns the rows that share a bucket with another, in order."""
        return np.flatnonzero((self._buckets >= 0).any(axis=0))

    def pairs(self, corpus: np.ndarray, queries: np.ndarray, *, insert: bool) -> Iterator[tuple[int, int]]:
        """Yields each query that is near a row of the corpus, with that row; `insert` adds those near none to it."""
        tables: dict[tuple[int, int], list[int]] = {}

        def learn(row: int) -> None:
            for key in self._keys(row):
                tables.setdefault(key, []).append(row)

        for row in corpus.tolist():
            learn(row)
        for row in queries.tolist():
            match = self._match(tables, row)
            if match is not None:
                yield row, match
            elif insert:
                learn(row)

    def _match(self, tables: dict[tuple[int, int], list[int]], row: int) -> int | None:
        near = {other for key in self._keys(row) for other in tables.get(key, ())[-MOST_COMPARED:]}
        if not near:
            return None
        # In order, so that of several that are as near the same one is named in every process.
        others = sorted(near)
        equal = (self._signatures[others] == self._signatures[row]).sum(axis=1)
        best = int(equal.argmax())
        return others[best] if equal[best] >= self._least else None

    def _keys(self, row: int) -> list[tuple[int, int]]:
        return [(band, bucket) for band, bucket in enumerate(self._buckets[:, row].tolist()) if bucket >= 0]


def _buckets(signatures: np.ndarray, size: int) -> np.ndarray:
    """Returns the bucket of each row in each band, -1 where it is alone there; shape (bands, rows)."""
    num_rows = len(signatures)
    buckets = np.full((NUM_HASHES // size, num_rows), -1, dtype=np.int32)
    for band in range(len(buckets)):
        # FNV-1a over the band; a collision costs a comparison, as their signatures tell whether rows are near.
        hashes = np.full(num_rows, 0xCBF29CE484222325, dtype=np.uint64)
        for column in signatures[:, band * size : (band + 1) * size].T:
            hashes = (hashes ^ column.astype(np.uint64)) * np.uint64(0x100000001B3)
        order = np.argsort(hashes, kind="stable")
        begins = np.flatnonzero(np.r_[True, np.diff(hashes[order]) != 0]) if num_rows else np.zeros(0, dtype=int)
        sizes = np.diff(np.r_[begins, num_rows])
        numbers = np.where(sizes > 1, np.arange(len(sizes), dtype=np.int32), -1)
        buckets[band, order] = np.repeat(numbers, sizes)
    return buckets


DEDUP_CHECKS = ("duplicates", "leakage", "near_duplicates")
"""In the order in which they drop rows. Leakage is before near duplicates, which must not keep a row that leakage takes
away."""
NONE = -1


class DedupChecks:
    def __init__(self, quality: QualityChecks, scratch: str) -> None:
        self._quality = quality
        self._is_on = {check: getattr(quality, check) != "off" for check in DEDUP_CHECKS}
        self._signatures = Signatures(f"{scratch}/signatures")
        self._content = array("Q")
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._file = array("I")
        self._line = array("Q")

    def add(self, record: Record) -> int:
        """Remembers a row, and returns 64 bits of its hash: two of a million rows share one with probability 3e-8."""
        hashed = int.from_bytes(hashlib.sha256(record.content.encode()).digest()[:8], "big")
        self._content.append(hashed)
        if record.file not in self._files:
            self._files[record.file] = len(self._names)
            self._names.append(record.file)
        self._file.append(self._files[record.file])
        self._line.append(record.line)
        if self._is_on["leakage"] or self._is_on["near_duplicates"]:
            self._signatures.add(training_text(record.row))
        return hashed

    def where(self, row: int) -> tuple[str, int]:
        return self._names[self._file[row]], self._line[row]

    def find(self, sides: np.ndarray) -> dict[str, np.ndarray]:
        """Returns for each check that is on the partner of each row, or -1; sides are by index in `SIDES`.

        The result does not depend on the order of the rows, but for which of several equal rows is the first. Among
        near rows the one with the smallest hash stays, and every other is near one that stays.
        """
        content = np.frombuffer(self._content, dtype=np.uint64)
        first = _first_equal(content, sides)
        partners: dict[str, np.ndarray] = {}
        if self._is_on["duplicates"]:
            partners["duplicates"] = np.where(first == np.arange(len(first)), NONE, first)
        signatures = self._signatures.rows()
        if not len(signatures):
            return partners
        index = LSHIndex(signatures, self._quality.near_duplicate_threshold)
        candidates = index.candidates()
        candidates = candidates[first[candidates] == candidates]
        candidates = candidates[np.argsort(content[candidates], kind="stable")]
        if self._is_on["leakage"]:
            trained, held_out = (candidates[(sides[candidates] == 0) == on] for on in (True, False))
            partners["leakage"] = _spread(index.pairs(held_out, trained, insert=False), first)
        if self._is_on["near_duplicates"]:
            if self._quality.leakage == "fix":
                candidates = candidates[partners["leakage"][candidates] == NONE]
            by_side = [candidates[sides[candidates] == number] for number in range(len(SIDES))]
            none = candidates[:0]
            pairs = (pair for queries in by_side for pair in index.pairs(none, queries, insert=True))
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
    """Returns the partner of each row, which is that of its first equal row."""
    partners = np.full(len(first), NONE, dtype=np.int64)
    for row, partner in pairs:
        partners[row] = partner
    return partners[first]
