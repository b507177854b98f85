"""Metrics of texts: to the last digit those of their reference implementations, and numbers by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rouge_score.rouge_scorer import RougeScorer

from baton.models import metrics
from baton.recipe.evaluation import FIGURES

WRITTEN = [
    "The cat sat on the mat, and the dog lay beside it.",
    "It is raining in Berlin today",
    "  42 ",
    "",
    "So the answer is 1,234 apples.\n#### 1234",
    "Etwas ganz anderes, mit Umlauten: äöü.",
]
TRUTH = [
    "The cat sat on the mat while the dog lay next to it.",
    "Today it rains in Berlin",
    "42",
    "Nothing was written here",
    "1,200 + 34 = 1,234\n#### 1,234",
    "",
]
"""The last row has no reference."""

KNOWN = [at for at, truth in enumerate(TRUTH) if truth]


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_corpus_scores_are_those_of_sacrebleu_s_command(metric: str, tmp_path: Path) -> None:
    for name, rows in (("written", WRITTEN), ("truth", TRUTH)):
        lines = (rows[at].replace("\n", " ") for at in KNOWN)
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "truth", "-i", "written", "-m", metric, "-w", "12", "-f", "json"]
    theirs = json.loads(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)
    found = metrics.METRICS[metric]([row.replace("\n", " ") for row in WRITTEN], TRUTH)
    assert round(found.figures[metric].value, 12) == theirs["score"]
    assert found.signatures[metric] == theirs["signature"]


def test_bleu_of_a_row_is_that_of_the_sentence() -> None:
    import sacrebleu

    each = metrics.bleu(WRITTEN, TRUTH).figures["bleu"].each
    assert each == [
        sacrebleu.sentence_bleu(said, [truth]).score if truth else None
        for said, truth in zip(WRITTEN, TRUTH, strict=True)
    ]
    assert each[2] == pytest.approx(100.0)
    assert each[3] == 0.0


def test_drawn_bleu_is_that_of_the_drawn_rows() -> None:
    """The second row twice and the first once, as sums of statistics and as texts."""
    import sacrebleu

    figure = metrics.bleu(WRITTEN, TRUTH).figures["bleu"]
    drawn = [0, 1, 1]
    found = figure.compute(figure.statistics[drawn].sum(0, keepdims=True))[0]
    assert found == sacrebleu.corpus_bleu([WRITTEN[at] for at in drawn], [[TRUTH[at] for at in drawn]]).score
    assert 0 < found < 100


def test_rouge_is_that_of_its_own_scorer() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    rows = [scorer.score(TRUTH[at], WRITTEN[at]) for at in KNOWN]
    found = metrics.rouge(WRITTEN, TRUTH)
    for kind, figure in found.figures.items():
        theirs = [row[kind].fmeasure for row in rows]
        assert figure.each == [*theirs, None], "the last row has no reference"
        assert figure.value == math.fsum(theirs) / 5
        assert 0 < figure.value < 1


def test_rouge_by_hand() -> None:
    """Two of three words in common either way: 2/3; one of two pairs: 1/2; `a … c` in order: 2/3."""
    found = metrics.figure_values(metrics.rouge(["a x c"], ["a b c"]).figures)
    assert found == pytest.approx({"rouge1": 2 / 3, "rouge2": 0.0, "rougeL": 2 / 3})


def test_an_exact_match_looks_past_white_space_at_the_ends() -> None:
    """Of five rows with a reference only the third, and there the blanks do not count."""
    found = metrics.exact_match(WRITTEN, TRUTH).figures["exact_match"]
    assert found.each == [0.0, 0.0, 1.0, 0.0, 0.0, None]
    assert found.value == pytest.approx(1 / 5)


NUMBERS = {
    "gsm8k": ("Half of 48 is 24.\n#### 72", "48 + 24 = 72\n#### 72", 1.0),
    "thousands": ("That makes $1,234.50", "1234.5", 1.0),
    "the last one": ("First 5, then 7", "5", 0.0),
    "negative": ("it is -3 degrees", "-3", 1.0),
    "a mark and then another number": ("#### 8 of 9", "8", 1.0),
    "no number written": ("I do not know", "12", 0.0),
    "no number to find": ("12", "a dozen", None),
    "no reference": ("12", "", None),
}


@pytest.mark.parametrize(("said", "truth", "score"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_are_compared_as_numbers(said: str, truth: str, score: float | None) -> None:
    assert metrics.numeric_match([said], [truth]).figures["numeric_match"].each == [score]


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_without_references_nothing_is_measured(metric: str) -> None:
    found = metrics.METRICS[metric](["said", "more"], ["", ""]).figures
    assert metrics.figure_values(found) == dict.fromkeys(found)
    assert {figure.not_measured for figure in found.values()} == {"no row counted"}


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_every_metric_has_an_interval_around_itself(metric: str) -> None:
    written = ["one 1", "the two 2", "the three and 4", "four words of it 4"] * 5
    truth = ["one 1", "two 2", "three and 3", "four words of this 4"] * 5
    found = metrics.METRICS[metric](written, truth).figures
    assert list(found) == list(FIGURES[metric])
    for name, (low, high) in metrics.intervals({"after": found}, 0.95, seed=0)["after"].items():
        assert low < found[name].value < high, name
        assert len(found) == len(metrics.intervals({"after": found}, 0.95, seed=0)["after"])
