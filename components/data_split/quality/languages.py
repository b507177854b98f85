"""Languages of the rows, by py3langid's classifier (97 languages), and the mix of a sample."""

from __future__ import annotations

import heapq
from collections import Counter
from functools import cache
from typing import Any

UNKNOWN = "und"
"""ISO 639's code for undetermined: text that is too short, or that fits several languages."""

LOOKED_AT = 600
"""Characters that decide a row's language; more cost time and change little."""
LEAST_LETTERS = 40
LEAST_CONFIDENCE = 0.9
SAMPLE = 1000
"""Rows whose mix is shown where no language is expected."""


def language(text: str) -> str:
    """Returns the ISO 639-1 code of a text's language, `und` where it is not clear."""
    text = text[:LOOKED_AT]
    if sum(map(str.isalpha, text)) < LEAST_LETTERS:
        return UNKNOWN
    code, confidence = _classifier().classify(text)
    return str(code) if confidence >= LEAST_CONFIDENCE else UNKNOWN


@cache
def _classifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # type: ignore[import-untyped]

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


class Mix:
    """Shares of languages, counted row by row or in a sample.

    The sample is the rows with the smallest hashes: the same rows give the same one in any order.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sample: list[tuple[int, str]] = []

    def count(self, code: str) -> None:
        """Counts a row whose language is known."""
        self._counts[code] += 1

    def offer(self, content: int, text: str) -> None:
        """Takes a row into the sample, if it belongs there.

        Args:
            content: Hash of the row's content, 64 bits.
            text: What is learned from it.
        """
        if len(self._sample) < SAMPLE:
            heapq.heappush(self._sample, (-content, text[:LOOKED_AT]))
        elif content < -self._sample[0][0]:
            heapq.heapreplace(self._sample, (-content, text[:LOOKED_AT]))

    def result(self) -> dict[str, object]:
        """Returns `rows` looked at and `shares`: pairs of language and share, the largest first."""
        counts = self._counts + Counter(language(text) for _, text in self._sample)
        total = counts.total()
        order = sorted(counts, key=lambda code: (-counts[code], code))
        return {"rows": total, "shares": [[code, round(counts[code] / total, 4)] for code in order]}
