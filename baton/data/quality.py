"""Inspects a split: fixes or drops rows, sums up findings, and ends the run if a check asks for it.

Checks of single rows work on the texts of a normalised row, whatever its shape. A finding is a line in `quality.jsonl`;
each check keeps a count and a few examples. py3langid's classifier tells 97 languages.

Checks of all rows together find duplicates, near duplicates, and training rows near a held-out row. MinHash estimates
the Jaccard similarity of word triples (Broder 1997). Candidates agree in all hashes of a band (Leskovec, Rajaraman,
Ullman: Mining of Massive Datasets, 3.4). Signatures take 256 bytes a row in a mapped file, in 16-bit hashes that
collide once in 65,536. All else takes some 50 bytes a row and 4 per band.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, Literal

import numpy as np

from baton import events
from baton.data import pii
from baton.data.rows import SIDES, Record, Spool, as_content
from baton.errors import UserError
from baton.pages import quality_page
from baton.recipe.data import QualityChecks
from baton.recipe.recipe import Recipe
from baton.runs.run import Run

Row = dict[str, Any]

LEARNED = ("text", "prompt", "completion", "messages", "chosen", "rejected", "answer")
"""Fields that are learned; all other fields of a row are the user's extra columns."""

_WORD = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]|\w+")
"""A word, or a character of a script that puts no spaces between words."""


def _labels(value: dict[str, Any]) -> tuple[str, ...]:
    """Returns the keys of a message, or of a tool or its call, whose values are no text."""
    return ("id", "type") if isinstance(value.get("function"), dict) else ("role", "tool_call_id")


def texts_of(value: Any) -> Iterator[str]:
    """Yields every text in a column's value, in order, without the roles of a conversation and ids."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from texts_of(part)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in _labels(value):
                yield from texts_of(part)


def row_texts(row: Row) -> Iterator[str]:
    for value in row.values():
        yield from texts_of(value)


def changed_value(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [changed_value(part, change) for part in value]
    if isinstance(value, dict):
        return {key: part if key in _labels(value) else changed_value(part, change) for key, part in value.items()}
    return value


def changed_row(row: Row, change: Callable[[str], str]) -> Row:
    return {name: changed_value(value, change) for name, value in row.items()}


def training_text(row: Row) -> str:
    """Returns the learned part of a row as one text."""
    return "\n".join(text for name in LEARNED if name in row for text in texts_of(row[name]))


def is_emptied(before: Row, after: Row) -> bool:
    """Tells whether a change of a row left nothing of a learned text."""
    pairs = (
        pair
        for name in LEARNED
        if name in before
        for pair in zip(texts_of(before[name]), texts_of(after[name]), strict=True)
    )
    return any(old != new and not new.strip() for old, new in pairs)


def split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def has_visible(text: str, least: int) -> bool:
    seen = 0
    for character in text:
        seen += not character.isspace() and unicodedata.category(character)[0] != "C"
        if seen >= least:
            return True
    return least == 0


def excerpt(text: str, start: int = 0) -> str:
    """Returns the part of a text around a place, marked where it was cut."""
    begin = max(0, start - 80)
    end = begin + 240
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"


Outcome = Literal["kept", "mended", "dropped"]
NUM_EXAMPLES = 5


@dataclass(frozen=True)
class RowFinding:
    """A check's finding in one row."""

    reason: str
    text: str  # whole: private parts can be masked only before anything is cut
    place: int = 0
    mended: Row | None = None  # None where `fix` drops it


@dataclass
class CheckTally:
    """Rows in which one check found something."""

    found: int = 0
    mended: int = 0
    dropped: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


class FindingsLog:
    """Writes findings of checks, a line each, and keeps counts; `last` is the last one in words."""

    def __init__(self, path: str, checks: Sequence[str]) -> None:
        self.path = path
        self.lines = 0
        self.last = ""
        self.tallies = {check: CheckTally() for check in checks}
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def note(self, check: str, record: Record, finding: RowFinding, outcome: Outcome, row: Row) -> None:
        """Keeps a finding, and the original row if it was fixed or dropped; all masked."""
        tally = self.tallies[check]
        tally.found += 1
        tally.mended += outcome == "mended"
        tally.dropped += outcome == "dropped"
        entry: dict[str, object] = {
            "check": check,
            "outcome": outcome,
            "file": record.file,
            "line": record.line,
            "reason": pii.redact(finding.reason),
        }
        if len(tally.examples) < NUM_EXAMPLES:
            tally.examples.append({**entry, "text": excerpt(pii.redact(finding.text), finding.place)})
        if outcome != "kept":
            entry["row"] = changed_row(row, pii.redact)
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.lines += 1
        self.last = f"data.quality.{check}: {entry['reason']}"

    def close(self) -> None:
        self._file.close()


UNKNOWN_LANGUAGE = "und"  # ISO 639's code for undetermined: text that is too short, or that fits several languages
LANGUAGE_CHARACTERS = 600  # characters that decide a row's language; more cost time and change little
LEAST_LETTERS = 40
LEAST_CONFIDENCE = 0.9
LANGUAGE_SAMPLE = 1000  # rows whose mix is shown where no language is expected


def language(text: str) -> str:
    """Returns the ISO 639-1 code of a text's language, `und` where it is not clear."""
    text = text[:LANGUAGE_CHARACTERS]
    if sum(map(str.isalpha, text)) < LEAST_LETTERS:
        return UNKNOWN_LANGUAGE
    code, confidence = _classifier().classify(text)
    return str(code) if confidence >= LEAST_CONFIDENCE else UNKNOWN_LANGUAGE


@cache
def _classifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


class LanguageMix:
    """Shares of languages, counted row by row or in a sample.

    The sample is the rows with the smallest hashes: the same rows give the same one in any order.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sample: list[tuple[int, str]] = []

    def count(self, code: str) -> None:
        self._counts[code] += 1

    def offer(self, content: int, text: str) -> None:
        """Takes a row's learned text into the sample, if the hash of its content belongs there."""
        if len(self._sample) < LANGUAGE_SAMPLE:
            heapq.heappush(self._sample, (-content, text[:LANGUAGE_CHARACTERS]))
        elif content < -self._sample[0][0]:
            heapq.heapreplace(self._sample, (-content, text[:LANGUAGE_CHARACTERS]))

    def result(self) -> dict[str, object]:
        """Returns the number of `rows`, and `shares`: pairs of language and share, the largest first."""
        counts = self._counts + Counter(language(text) for _, text in self._sample)
        total = counts.total()
        order = sorted(counts, key=lambda code: (-counts[code], code))
        return {"rows": total, "shares": [[code, round(counts[code] / total, 4)] for code in order]}


RowCheck = Callable[[Row], RowFinding | None]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")  # roles that chat templates know

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Unicode's control characters (Cc) but tab, line feed and carriage return."""


def encoding(row: Row) -> RowFinding | None:
    """Finds text decoded with the wrong table, by ftfy's heuristic, and U+FFFD, which cannot be fixed."""
    damaged = [text for text in row_texts(row) if not text.isascii() and _is_damaged(text)]
    if not damaged:
        return None
    import ftfy

    mended = changed_row(row, ftfy.fix_encoding)
    if mended == row:
        return RowFinding("replacement characters (U+FFFD)", damaged[0], damaged[0].find("\ufffd"), row)
    text = next((text for text in damaged if ftfy.fix_encoding(text) != text), damaged[0])
    shown, meant = pii.redact(text), pii.redact(ftfy.fix_encoding(text))
    place = next((at for at, pair in enumerate(zip(shown, meant, strict=False)) if pair[0] != pair[1]), 0)
    return RowFinding(f"decoded with the wrong table: {meant[place : place + 20]!r} is meant", text, place, mended)


def _is_damaged(text: str) -> bool:
    import ftfy.badness

    return "\ufffd" in text or (bool(ftfy.badness.is_bad(text)) and ftfy.fix_encoding(text) != text)


def control_characters(row: Row) -> RowFinding | None:
    for text in row_texts(row):
        if match := _CONTROL.search(text):
            mended = changed_row(row, lambda part: _CONTROL.sub("", part))
            return RowFinding(f"control character U+{ord(match[0]):04X}", text, match.start(), mended)
    return None


def same_answers(row: Row) -> RowFinding | None:
    """Finds preferences whose answers differ in white space at most."""
    if "chosen" not in row or "rejected" not in row:
        return None
    chosen, rejected = (" ".join(" ".join(texts_of(row[side])).split()) for side in ("chosen", "rejected"))
    return RowFinding("chosen and rejected are the same", chosen) if chosen == rejected else None


def near_empty(row: Row, least: int) -> RowFinding | None:
    """Finds fields with fewer visible characters than `least`, and turns of a conversation with none.

    Only the assistant's words count in a conversation. A turn that calls a tool may have no text.
    """
    for name in ("text", "prompt", "completion", "messages", "chosen", "rejected"):
        value = row.get(name)
        if isinstance(value, list):
            for number, message in enumerate(value, 1):
                if not any(has_visible(text, 1) for text in texts_of(message)):
                    return RowFinding(f"turn {number} of {name} has no text", _summary(row))
            answers = [message for message in value if message.get("role") == "assistant"]
            value = " ".join(text for message in answers for text in texts_of(message)) if answers else None
        if isinstance(value, str) and not has_visible(value, least):
            return RowFinding(f"{name} has fewer than {least} visible characters", _summary(row))
    return None


def turns(row: Row) -> RowFinding | None:
    """Finds conversations with unknown roles, or in which user and assistant do not take turns."""
    if isinstance(row.get("messages"), list):
        talks = [(row["messages"], True)]
    elif isinstance(row.get("prompt"), list):
        ends = [row[side] for side in ("chosen", "rejected", "completion") if isinstance(row.get(side), list)]
        talks = [(row["prompt"] + end, True) for end in ends] or [(row["prompt"], False)]
    else:
        return None
    for talk, is_answered in talks:
        if reason := _out_of_turn([str(message.get("role")) for message in talk], is_answered):
            return RowFinding(reason, _summary(row))
    return None


def _out_of_turn(roles: list[str], is_answered: bool) -> str | None:
    before = "system"
    for number, role in enumerate(roles, 1):
        if role not in ROLES:
            return f"turn {number} has the unknown role {role!r}"
        if role in ("system", "developer"):
            continue
        if role == "user" and before == "user":
            return f"turn {number} is the user's, as the previous one"
        if role == "assistant" and before == "assistant":
            return f"turn {number} is the assistant's, as the previous one"
        if role != "user" and before == "system":
            return f"turn {number} is the {role}'s, before the user's first"
        before = role
    if is_answered and before == "user":
        return "the last turn is the user's and has no answer"
    return None


def _private(row: Row, find: Callable[[str], list[pii.PiiSpan]], word: str) -> RowFinding | None:
    places = [(text, spans) for text in row_texts(row) if (spans := find(text))]
    if not places:
        return None
    kinds = dict.fromkeys(span.kind for _, spans in places for span in spans)
    text, spans = places[0]
    mended = changed_row(row, lambda part: pii.without(part, find(part), word))
    return RowFinding(", ".join(kinds), pii.without(text, spans, word), spans[0].start, mended)


def _summary(row: Row) -> str:
    return " · ".join(f"{name}: {_shown(value)}" for name, value in row.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        shown = ((part.get("role", "tool declared"), " ".join(texts_of(part))) for part in value)
        return " / ".join(f"{label}: {text}" for label, text in shown)
    return str(value)


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
    words = split_words(text[:LONGEST])
    return [" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))]


def band_rows(threshold: float) -> int:
    """Returns the hashes of a band: the most with which a pair at the threshold is found in 99 of 100 cases.

    A pair of similarity s agrees in at least one of b bands of r hashes with probability 1 - (1 - s^r)^b.
    """
    return next((r for r in (32, 16, 8, 4, 2) if 1 - (1 - threshold**r) ** (NUM_HASHES // r) >= 0.99), 1)


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
        self._files: dict[str, int] = {}  # name → place among `_names`
        self._names: list[str] = []
        self._file = array("I")
        self._line = array("Q")

    def add(self, record: Record) -> int:
        """Remembers a row, and returns 64 bits of its hash: two of a million rows share one with probability 3e-8."""
        hashed = int.from_bytes(hashlib.sha256(record.content.encode()).digest()[:8], "big")
        self._content.append(hashed)
        self._file.append(self._files.setdefault(record.file, len(self._files)))
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
        self._names = list(self._files)
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
        # The first of equal rows represents them; by hash, so that another order of the rows gives the same pairs.
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


LEAST_ROWS, LEAST_ROWS_ADAPTER = 100, 50
"""Least training rows without a finding of `few_rows`: Unsloth's guide to datasets names 100 as the least for
reasonable results, OpenAI's guide to fine-tuning sees clear improvements from 50 to 100 rows."""

LIKE = {"duplicates": "the same as", "near_duplicates": "nearly the same as", "leakage": "like the held-out"}


@dataclass
class _Column:
    rows: int = 0
    empty: int = 0
    characters: int = 0
    longest: int = 0

    def told(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "empty_share": round(self.empty / self.rows, 6),
            "mean_characters": round(self.characters / self.rows, 1),
            "longest": self.longest,
        }


class Inspection:
    """The checks of one split: rows pass through, are fixed or dropped, and findings are summed up."""

    def __init__(self, recipe: Recipe, scratch: str) -> None:
        self._recipe = recipe
        self._quality = recipe.data.quality
        checks: dict[str, RowCheck] = {  # in their order: text is fixed before it is judged
            "encoding": encoding,
            "control_characters": control_characters,
            "same_answers": same_answers,
            "empty": lambda row: near_empty(row, recipe.data.quality.near_empty_characters),
            "turns": turns,
            "secrets": lambda row: _private(row, pii.secrets, pii.SECRET),
            "emails": lambda row: _private(row, pii.emails, pii.EMAIL),
        }
        self._checks = [(name, check) for name, check in checks.items() if self._action(name) != "off"]
        # Those that find rows; `few_rows` checks their number, and `truncation` is the tokenizer's.
        self.findings = FindingsLog(f"{scratch}/quality.jsonl", [*checks, "language", *DEDUP_CHECKS])
        self._sets = DedupChecks(self._quality, scratch)
        self._mix = LanguageMix()
        self._columns: dict[str, _Column] = {}
        self._looked_at = self.dropped = self._mended = 0
        self._num_train = 0

    def look(self, record: Record) -> Record | None:
        """Returns a row, fixed where a check does so, or None where it is dropped."""
        self._looked_at += 1
        row = original = record.row
        self._measure(row)
        for name, check in self._checks:
            finding = check(row)
            after = row if finding is None else self._judge(name, finding, record, row)
            if after is None:
                break
            row = after
        else:
            if not self._is_foreign(row, record):
                self._mended += row is not original
                return record if row is original else replace(record, content=as_content(row))
        self.dropped += 1
        return None

    def _judge(self, check: str, finding: RowFinding, record: Record, row: Row) -> Row | None:
        if self._action(check) != "fix" or finding.mended is row:
            self.findings.note(check, record, finding, "kept", row)
            return row
        mended = finding.mended
        if mended is not None and is_emptied(row, mended):
            mended = None
        self.findings.note(check, record, finding, "dropped" if mended is None else "mended", row)
        return mended

    def _is_foreign(self, row: Row, record: Record) -> bool:
        """Counts a row's language, and tells whether the row is dropped for it."""
        expected = self._quality.languages
        if self._action("language") == "off" or not expected:
            return False
        text = training_text(row)
        code = language(text)
        self._mix.count(code)
        if code in (UNKNOWN_LANGUAGE, *expected):
            return False
        finding = RowFinding(f"language {code}, expected {' or '.join(expected)}", text)
        return self._judge("language", finding, record, row) is None

    def remember(self, record: Record) -> None:
        hashed = self._sets.add(record)
        if self._action("language") != "off" and not self._quality.languages:
            self._mix.offer(hashed, training_text(record.row))

    def resolve(self, records: Spool, sides: np.ndarray) -> np.ndarray:
        """Inspects all rows together, in the order of `remember`, and returns a bool for each: whether it is kept."""
        kept = np.ones(len(records), dtype=bool)
        partners = self._sets.find(sides)
        if any((each != NONE).any() for each in partners.values()):
            for number, record in enumerate(records):
                kept[number] = not self._is_superfluous(number, record, sides, partners)
        self.dropped += int((~kept).sum())
        self._num_train = int((kept & (sides == 0)).sum())
        self.findings.close()
        return kept

    def _is_superfluous(self, number: int, record: Record, sides: np.ndarray, partners: dict[str, np.ndarray]) -> bool:
        """Notes the rows that a row is like, and tells whether it is dropped for one."""
        for check in DEDUP_CHECKS:
            partner = int(partners[check][number]) if check in partners else NONE
            if partner == NONE:
                continue
            file, line = self._sets.where(partner)
            place = "" if file == record.file else f"{os.path.basename(file)} "
            reason = f"{LIKE[check]} {place}line {line} ({SIDES[sides[partner]]})"
            if self._judge(check, RowFinding(reason, training_text(record.row)), record, record.row) is None:
                return True
        return False

    def summary(self, counts: dict[str, int], unusable: list[dict[str, Any]], num_read: int) -> dict[str, Any]:
        """Returns `rows`, `checks` (each with its action, verdict, rows found, of how many, share, `mended`, dropped
        and examples), `languages` and `columns`.

        Args:
            counts: `train` (as often as it is used), `eval`, `test`, `rejected`.
            unusable: The first rejected rows: `file`, `line`, `reason`, `raw`.
            num_read: Rows that were read, the rejected ones among them.
        """
        of = {"looked_at": self._looked_at, "mended": self._mended, "dropped": self.dropped}
        checks = {
            name: _entry(tally.found, self._looked_at, tally.examples, mended=tally.mended, dropped=tally.dropped)
            for name, tally in self.findings.tallies.items()
        }
        least = self._quality.least_rows or (LEAST_ROWS_ADAPTER if self._recipe.adapter else LEAST_ROWS)
        checks["few_rows"] = _entry(min(counts["train"], self._num_train), least, [])
        checks["rejected"] = _entry(counts["rejected"], num_read, [_unusable(row) for row in unusable])
        return {
            "method": self._recipe.training.method,
            "rows": {**counts, **of},
            "checks": {name: quality_page.judged(name, check, self._recipe.data) for name, check in checks.items()},
            "languages": {"expected": self._quality.languages, **self._mix.result()},
            "columns": {name: column.told() for name, column in self._columns.items()},
        }

    def _action(self, check: str) -> str:
        return str(getattr(self._quality, check))

    def _measure(self, row: Row) -> None:
        for name, value in row.items():
            if isinstance(value, str | list):
                length = sum(map(len, texts_of(value)))
                column = self._columns.setdefault(name, _Column())
                column.rows += 1
                column.characters += length
                column.longest = max(column.longest, length)
                column.empty += length == 0 or not any(has_visible(text, 1) for text in texts_of(value))


def _unusable(row: dict[str, Any]) -> dict[str, object]:
    reason, text = pii.redact(row["reason"]), excerpt(pii.redact(row["raw"][:10_000]))
    return {"file": row["file"], "line": row["line"], "reason": reason, "outcome": "dropped", "text": text}


def _entry(
    rows: int, of: int, examples: list[dict[str, Any]], *, mended: int = 0, dropped: int = 0
) -> quality_page.CheckCounts:
    share = round(rows / of, 6) if of else 0.0
    return {"rows": rows, "of": of, "share": share, "mended": mended, "dropped": dropped, "examples": examples}


def write_quality(run: Run, inspection: Inspection, split: dict[str, Any], rejected_path: str) -> str:
    """Writes `quality.json`, `quality.jsonl` and the page of a run, and returns the page.

    `split` has the counts `train`, `eval`, `test` and `rejected`, the counts of its `sources`, and `rejected_uri`.

    Raises:
        UserError: a check that is to fail found something; it is written all the same.
    """
    num_findings = inspection.findings.lines
    where = run.storage.uri(run.path(quality_page.FINDINGS))
    if num_findings:
        run.storage.upload(inspection.findings.path, run.path(quality_page.FINDINGS))
    counts = {name: split[name] for name in ("train", "eval", "test", "rejected")}
    num_read = sum(source["rows"] + source["rejected"] for source in split["sources"])
    with open(rejected_path, encoding="ascii") as file:
        first_rejected = [json.loads(line) for line in islice(file, NUM_EXAMPLES)]
    summary = inspection.summary(counts, first_rejected, num_read)
    places = {"findings_uri": where if num_findings else None, "rejected_uri": split["rejected_uri"]}
    run.put(
        quality_page.QUALITY, {**summary, **places, "sources": [source_in_words(source) for source in split["sources"]]}
    )
    page = quality_page.write(run)
    quality = quality_page.collect(run)
    events.emit(
        events.Quality(state=quality["state"], sentence=quality["sentence"], page=run.uri + f"/{quality_page.PAGE}")
    )
    require_verdicts(summary, where)
    return page


def source_in_words(source: dict[str, Any]) -> str:
    """Returns in one line the columns of a source by our names."""
    told = events.Source.read({"unused": None, **source})
    return f"{told.uri} holds {told.in_words}"


def require_verdicts(summary: dict[str, Any], where: str) -> None:
    """Raises UserError if a check that may end the run found something."""
    failed = {
        name: check
        for name, check in summary["checks"].items()
        if check["verdict"] == "failed" and name != "rejected"  # with more detail from the split
    }
    if not failed:
        return
    place = f" All are in {where}." if set(failed) - {"few_rows"} else ""
    settings = " and ".join(f"data.quality.{name}" for name in failed)
    raise UserError(
        f"{'; '.join(_told(name, check) for name, check in failed.items())}.{place}",
        remedy=f"Fix the data, or set {settings} to warn or fix.",
    )


def _told(name: str, check: quality_page.CheckVerdict) -> str:
    if name == "few_rows":
        return f"data.quality.few_rows: {check['rows']} training rows, at least {check['of']} are expected"
    first = check["examples"][0]
    return (
        f"data.quality.{name}: found in {check['rows']} of {check['of']} rows; "
        f"the first is {os.path.basename(first['file'])} line {first['line']}: {first['reason']}"
    )
