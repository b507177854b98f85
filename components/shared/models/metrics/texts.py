"""Compares a model's completions with the rows' own answers, by the metrics' reference implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from baton.components.shared.models.metrics.figures import Array, Figure, mean
from baton.components.shared.models.rewards.numeric import number
from baton.components.shared.recipe.evaluation import ROUGE


@dataclass
class Scored:
    """A metric's figures and their signatures.

    Attributes:
        figures: By name, each over all rows; a row without a reference does not count.
        signatures: What exactly was computed, by the figure's name, where a reference implementation says so.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)


Metric = Callable[[Sequence[str], Sequence[str]], Scored]
"""Called with what was written and the rows' own answers, '' where a row has none."""


def exact_match(completions: Sequence[str], references: Sequence[str]) -> Scored:
    """Returns the share of texts that are the reference, white space at the ends aside."""
    pairs = zip(completions, references, strict=True)
    same = [float(completion.strip() == truth.strip()) if truth else None for completion, truth in pairs]
    return Scored({"exact_match": mean(same)})


def numeric_match(completions: Sequence[str], references: Sequence[str]) -> Scored:
    """Returns the share of texts whose number is the reference's: that after `####`, else the last one.

    A row whose reference has no number does not count.
    """
    pairs = [(number(completion), number(truth)) for completion, truth in zip(completions, references, strict=True)]
    return Scored(
        {"numeric_match": mean([None if truth is None else float(completion == truth) for completion, truth in pairs])}
    )


def bleu(completions: Sequence[str], references: Sequence[str]) -> Scored:
    """Returns sacreBLEU's corpus BLEU (Papineni et al. 2002, Post 2018), 0 to 100; of one row that with the effective
    order, as one row often has no four words in common."""
    from sacrebleu.metrics import BLEU

    return _corpus("bleu", BLEU(), BLEU(effective_order=True), completions, references)


def chrf(completions: Sequence[str], references: Sequence[str]) -> Scored:
    """Returns sacreBLEU's corpus chrF2 (Popović 2015), 0 to 100."""
    from sacrebleu.metrics import CHRF

    return _corpus("chrf", CHRF(), CHRF(), completions, references)


def rouge(completions: Sequence[str], references: Sequence[str]) -> Scored:
    """Returns the mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004), 0 to 1, without stemming.

    The reference implementation knows words of ASCII letters and digits alone: in other scripts it finds nothing.
    """
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))
    rows = [
        scorer.score(truth, completion) if truth else None
        for completion, truth in zip(completions, references, strict=True)
    ]
    figures = {kind: mean([row and row[kind].fmeasure for row in rows]) for kind in ROUGE}
    return Scored(figures, dict.fromkeys(ROUGE, f"rouge-score {version('rouge-score')}, F-measure, no stemming"))


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "bleu": bleu,
    "chrf": chrf,
    "rouge": rouge,
}
"""By the recipe's names; `bertscore` needs a model, and has its own module."""


def _corpus(name: str, metric: Any, single: Any, completions: Sequence[str], references: Sequence[str]) -> Scored:
    """Returns a metric that is computed from counts summed over the rows."""
    rows = [at for at, truth in enumerate(references) if truth]
    if not rows:
        return Scored({name: mean([None] * len(references))})
    counts = metric._extract_corpus_statistics([completions[at] for at in rows], [[references[at] for at in rows]])
    statistics = np.zeros((len(references), 1 + len(counts[0])))
    statistics[rows] = [[1, *row] for row in counts]
    each: list[float | None] = [None] * len(references)
    for at, row in zip(rows, counts, strict=True):
        each[at] = float(single._compute_score_from_stats(row).score)

    def compute(sums: Array) -> Array:
        return np.array(
            [metric._compute_score_from_stats(row[1:].astype(int).tolist()).score if row[0] else np.nan for row in sums]
        )

    return Scored({name: Figure(statistics, compute, each)}, {name: str(metric.get_signature())})
