"""The report's part on evaluation: figures beside each other, the gate, and every example."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.pages import collect
from baton.pages.collect import RunReport
from baton.pages.run_page import render
from baton.runs.outcomes import EvaluationResult
from baton.runs.run import Run
from baton.store.storage import Storage

NUM_EXAMPLES = 45
REJECTED = "perplexity 24.5 is not <= baseline * 0.005 = 20.3"
DOCUMENT: dict[str, Any] = {
    "before": {"loss": 8.31, "perplexity": 4064.3, "tokens": 9000, "numeric_match": 0.02, "rougeL": 0.3},
    "after": {"loss": 3.2, "perplexity": 24.5, "tokens": 9000, "numeric_match": 0.31, "rougeL": 0.25},
    "production": {"loss": 3.3, "perplexity": 27.1, "tokens": 9000, "numeric_match": 0.3, "rougeL": 0.3},
    "production_model": "models:/tutor@production, version 3",
    "side": "test",
    "intervals": {
        "after": {"perplexity": [23.9, 25.2], "numeric_match": [0.22, 0.4], "rougeL": [0.2, 0.3]},
        "gain": {"perplexity": [-4100.0, -3980.0], "numeric_match": [-0.01, 0.55], "rougeL": [-0.08, -0.02]},
    },
    "gate": {
        "passed": False,
        "lines": [
            {"figure": "perplexity", "held": False, "words": REJECTED},
            {"figure": "numeric_match", "held": True, "words": "numeric_match 0.31 is >= production = 0.3"},
        ],
    },
    "samples": [],
    "examples": {"count": NUM_EXAMPLES, "path": "examples.jsonl"},
}
EVALUATION = EvaluationResult.model_validate(DOCUMENT)


def _examples() -> list[dict[str, Any]]:
    return [
        {
            "number": number,
            "prompt": f"What is {number} + 1? <b>",
            "reference": str(number + 1),
            "before": "the the",
            "after": f"#### {number + 1}",
            "production": f"It is {number + 2}.",
            "scores": {"before": {"numeric_match": 0.0}, "after": {"numeric_match": 1.0}},
        }
        for number in range(NUM_EXAMPLES)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(Storage(str(tmp_path)), "judged")
    text = "".join(json.dumps(example) + "\n" for example in _examples())
    made.storage.write(made.path("examples.jsonl"), text.encode())
    return made


def test_figures_of_the_gate_come_first_and_a_change_is_called_good_only_beyond_doubt() -> None:
    rows = collect.figure_rows(EVALUATION)
    assert [row.name for row in rows] == ["perplexity", "numeric_match", "loss", "rougeL"]
    assert [row.tone for row in rows] == ["good", "", "", "bad"]
    assert [row.held for row in rows] == [False, True, True, True]
    assert rows[0].gain == "−4,040 (−4,100 to −3,980)"
    assert (rows[1].production, rows[1].low, rows[1].high) == (0.3, 0.22, 0.4)
    assert (rows[2].gain, rows[2].low) == ("", None)


DIRECTIONS: dict[str, tuple[str, dict[str, str | None], str, str]] = {
    "as the evaluation says": ("wikitext.word_perplexity", {"wikitext.word_perplexity": "lower"}, "", "good"),
    "more is better": ("gsm8k.exact_match", {"gsm8k.exact_match": "higher"}, "", "bad"),
    "nobody knows": ("mine", {"mine": None}, "", ""),
    "nobody knows but the gate, less": ("mine", {"mine": None}, "<= baseline", "good"),
    "nobody knows but the gate, more": ("mine", {"mine": None}, ">= 0.1", "bad"),
    "divergence, of an older Baton": ("divergence", {}, "", "good"),
    "perplexity, of an older Baton": ("wikitext.byte_perplexity", {}, "", "good"),
    "loss, of an older Baton": ("loss", {}, "", "good"),
    "accuracy, of an older Baton": ("accuracy", {}, "", "bad"),
}


@pytest.mark.parametrize(("name", "better", "line", "tone"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_a_figure_that_fell_has_the_tone_of_its_direction(
    name: str, better: dict[str, str | None], line: str, tone: str
) -> None:
    lines = [{"figure": name, "line": line, "held": True, "words": "held"}] if line else []
    evaluation = EvaluationResult.model_validate(
        {
            "before": {name: 2.0},
            "after": {name: 1.0},
            "better": better,
            "intervals": {"gain": {name: [-1.2, -0.8]}},
            "gate": {"passed": True, "lines": lines},
        }
    )
    (row,) = collect.figure_rows(evaluation)
    assert row.tone == tone


def test_a_figure_that_was_not_measured_is_none(full_report: Callable[..., RunReport]) -> None:
    figures = {"before": {"loss": 2.0, "reward": None}, "after": {"loss": None, "reward": None}}
    evaluation = EvaluationResult.model_validate({**figures, "not_measured": {"after": {"loss": "not finite"}}})
    html = render(replace(full_report(), evaluation=evaluation))
    assert "not measured: not finite" in html
    assert "Eval loss was not measured after training" in html


def test_examples_come_in_pages(run: Run) -> None:
    examples = collect.examples(run, EVALUATION)
    pages = collect.example_pages(examples.shown)
    assert [(title, len(examples)) for title, examples in pages] == [("1–20", 20), ("21–40", 20), ("41–45", 5)]
    assert str(examples.uri).endswith("/runs/judged/examples.jsonl")


def test_the_page_of_a_rejected_run_says_so_first(run: Run, full_report: Callable[..., RunReport]) -> None:
    examples = collect.examples(run, EVALUATION)
    page = render(replace(full_report(), export=None, evaluation=EVALUATION, examples=examples))
    assert f"The gate rejects the model, and nothing was exported: {REJECTED.replace('<', '&lt;')}. Eval loss" in page
    assert page.count("<tr>") > NUM_EXAMPLES
    assert "What is 44 + 1? &lt;b&gt;" in page
    assert "models:/tutor@production, version 3" in page


def test_a_run_that_was_not_evaluated_has_no_such_part(full_report: Callable[..., RunReport]) -> None:
    assert "<h2>Evaluation</h2>" not in render(replace(full_report(), evaluation=None))
