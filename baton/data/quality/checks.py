"""Checks of single rows: encoding, language, length; and the log and counts of findings.

Checks work on the texts of a normalised row, whatever its shape. A finding is a line in `quality.jsonl`; each check
keeps a count and a few examples. py3langid's classifier tells 97 languages.
"""

from __future__ import annotations

import heapq
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from baton.data.quality import pii
from baton.data.rows import Record
from baton.recipe.recipe import Recipe

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


def words(text: str) -> list[str]:
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
        """Keeps a finding, and the original row where it was mended or dropped; all masked."""
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


def row_checks(recipe: Recipe) -> dict[str, RowCheck]:
    """Returns the checks of single rows, in their order: text is mended before it is judged."""
    return {
        "encoding": encoding,
        "control_characters": control_characters,
        "same_answers": same_answers,
        "empty": lambda row: near_empty(row, recipe.data.quality.near_empty_characters),
        "turns": turns,
        "secrets": lambda row: _private(row, pii.secrets, pii.SECRET),
        "emails": lambda row: _private(row, pii.emails, pii.EMAIL),
    }


def encoding(row: Row) -> RowFinding | None:
    """Finds text decoded with the wrong table, by ftfy's heuristic, and U+FFFD, which nothing can mend."""
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
            return f"turn {number} is the user's, as the one before"
        if role == "assistant" and before == "assistant":
            return f"turn {number} is the assistant's, as the one before"
        if role != "user" and before == "system":
            return f"turn {number} is the {role}'s, before the user has said anything"
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
