"""Finds texts to be neither learned nor shown: secrets, by the rules of detect-secrets, and real e-mail addresses.

The rules are those for keys and tokens of named services, and the one for passwords that are assigned in quotes; rules
by entropy alone, and for public IP addresses, find too much in prose, mathematics and code. A match counts if it looks
drawn at random and is no placeholder.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import math
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

SECRET, EMAIL = "[SECRET]", "[EMAIL]"

LEFT_OUT = ("IPPublicDetector", "KeywordDetector", "PrivateKeyDetector", "BasicAuthDetector")
"""Rules that have an own place below, or that no candidate is held against."""

LEAST_KEY = 20  # characters of the shortest key that a service gives out
LONGEST_KEY = 4000  # characters; longer ones are an image or a file in base 64
AROUND = 100  # characters before and after a candidate that a rule may read
LEAST_PASSWORD = 8
LEAST_ENTROPY = 3.0
"""Bits per character, by the frequencies of a match's own characters; 20 random hexadecimal digits have about 3.4."""

_CANDIDATE = re.compile(rf"[A-Za-z0-9_\-+/=.:]{{{LEAST_KEY},}}")
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,40}-----"
    r"(?:[A-Za-z0-9+/=\s:,\\]|-(?!----BEGIN)){64,20000}?-----END [A-Z0-9 ]{1,80}-----"
)
_BASIC_AUTH = re.compile(r"://[^\s:/@\"'<>]{1,200}:([^\s/@\"'<>]{4,200})@[\w.\-]+")
_ASSIGNED = re.compile(r"(?:pass|pwd|key|secret|contrase)\w{0,40}[\]\"')]{0,3}\s{0,5}(?:[:=]|\(|[\"'`])", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"example|sample|placeholder|dummy|fake|redacted|change_?me|your|insert|xxxx|\*\*\*|\.\.\.|0000|1234|abcd|pass|"
    r"secret|token|test|[<>{}]|^[$%]",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"(?<![\w.+%-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w-])"
)
_UNREAL_HOST = re.compile(
    r"(?:^|\.)(?:example|test|invalid|localhost|local)(?:\.|$)|"
    r"(?:^|\.)(?:(?:your|my|some|a|the|old|new)?-?"
    r"(?:domain|company|mail|email|site|website|host|server)|foo|bar|abc|xyz|acme)\."
    r"[a-z]+$|\.(?:png|jpe?g|gif|svg|webp|js|css|py|html?)$",
    re.IGNORECASE,
)
"""Reserved names (RFC 2606, RFC 6761), placeholder names, and file names."""
_UNREAL_USER = re.compile(r"^(?:git|hg|svn|x+|foo|bar|your\S*|user_?name|e?mail|no-?reply)$", re.IGNORECASE)


@dataclass(frozen=True)
class PiiSpan:
    """A private part of a text."""

    start: int
    end: int
    kind: str


def secrets(text: str) -> list[PiiSpan]:
    """Returns the secrets in a text that look real, in order, without overlaps."""
    spans: list[PiiSpan] = []
    if "PRIVATE KEY" in text:
        spans += [PiiSpan(*match.span(), "private key") for match in _KEY_BLOCK.finditer(text)]
    if "://" in text and "@" in text:
        spans += [
            PiiSpan(*match.span(1), "password in an address")
            for match in _BASIC_AUTH.finditer(text)
            if not _PLACEHOLDER.search(match[1]) and len(set(match[1])) >= 4
        ]
    for start, end in _candidates(text):
        spans += _keys(text, start, end)
    if _ASSIGNED.search(text):
        spans += _passwords(text)
    # Of overlapping ones, the first and longest.
    apart: list[PiiSpan] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if not apart or span.start >= apart[-1].end:
            apart.append(span)
    return apart


def emails(text: str) -> list[PiiSpan]:
    if "@" not in text:
        return []
    spans = []
    for match in _ADDRESS.finditer(text):
        user, _, host = match[0].rpartition("@")
        if not _UNREAL_HOST.search(host) and not _UNREAL_USER.search(user):
            spans.append(PiiSpan(*match.span(), "e-mail address"))
    return spans


def without(text: str, spans: list[PiiSpan], word: str) -> str:
    """Returns a text with a word in the place of each span."""
    for span in reversed(spans):
        text = f"{text[: span.start]}{word}{text[span.end :]}"
    return text


def redact(text: str) -> str:
    text = without(text, secrets(text), SECRET)
    return without(text, emails(text), EMAIL)


def _candidates(text: str) -> Iterator[tuple[int, int]]:
    """Yields the parts of a text that may hold keys, with their surroundings: a hundredth of most texts."""
    waiting: tuple[int, int] | None = None
    for match in _CANDIDATE.finditer(text):
        if len(match[0]) > LONGEST_KEY or not _is_mixed(match[0]):
            continue
        start, end = max(0, match.start() - AROUND), match.end() + AROUND
        if waiting and start <= waiting[1]:
            start = waiting[0]
        elif waiting:
            yield waiting
        waiting = start, end
    if waiting:
        yield waiting


def _keys(text: str, start: int, end: int) -> Iterator[PiiSpan]:
    for kind, patterns in _rules():
        for pattern in patterns:
            for match in pattern.finditer(text, start, end):
                place = _secret_part(match)
                if _is_key(text[slice(*place)]):
                    yield PiiSpan(*place, kind)


def _passwords(text: str) -> Iterator[PiiSpan]:
    detector, offset = _keyword_rule(), 0
    for line in text.splitlines(keepends=True):
        if len(line) < 2000 and _ASSIGNED.search(line):
            for value in detector.analyze_string(line):
                at = line.find(value)
                if at >= 0 and (
                    len(value) >= LEAST_PASSWORD
                    and not re.search(r"\s", value)
                    and _is_mixed(value)
                    and not _PLACEHOLDER.search(value)
                    and "(" not in value
                    and entropy(value) >= LEAST_ENTROPY - 0.25
                ):
                    yield PiiSpan(offset + at, offset + at + len(value), "password")
        offset += len(line)


@cache
def _rules() -> list[tuple[str, list[re.Pattern[str]]]]:
    """Returns the rules of detect-secrets for named services: kind, and patterns."""
    import detect_secrets.plugins
    from detect_secrets.plugins.base import RegexBasedDetector

    rules = {}
    for module in pkgutil.iter_modules(detect_secrets.plugins.__path__):
        for name, value in vars(importlib.import_module(f"detect_secrets.plugins.{module.name}")).items():
            is_rule = isinstance(value, type) and issubclass(value, RegexBasedDetector)
            if is_rule and value is not RegexBasedDetector and name not in LEFT_OUT:
                rules[name] = (str(value.secret_type), list(value.denylist))
    return [rules[name] for name in sorted(rules)]


@cache
def _keyword_rule() -> Any:
    from detect_secrets.plugins.keyword import KeywordDetector

    return KeywordDetector()


def _secret_part(match: re.Match[str]) -> tuple[int, int]:
    """Returns the secret's place in a match: a group, where the pattern takes the words around it along."""
    groups = [match.span(number) for number in range(1, (match.re.groups or 0) + 1) if match[number]]
    longest = max(groups, key=lambda span: span[1] - span[0], default=match.span())
    return longest if longest[1] - longest[0] >= LEAST_KEY else match.span()


def _is_key(value: str) -> bool:
    if value.startswith("eyJ"):
        return _is_token(value)
    return (
        len(value) >= LEAST_KEY
        and _is_mixed(value)
        and not _PLACEHOLDER.search(value)
        and entropy(value) >= LEAST_ENTROPY
    )


def _is_token(value: str) -> bool:
    """Tells whether a JSON web token is one, and not the one of the tutorials."""
    head, _, rest = value.partition(".")
    try:
        read = [base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in (head, rest.partition(".")[0])]
    except (binascii.Error, ValueError):
        return False
    return b'"alg"' in read[0] and b"1234567890" not in read[1]


def _is_mixed(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def entropy(text: str) -> float:
    """Returns the Shannon entropy of a text's characters, in bits per character."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())
