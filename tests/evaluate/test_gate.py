"""Each line of a gate against an evaluation, with the verdict by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from baton.errors import UserError
from baton.evaluate.gate import as_markdown, judge
from baton.recipe.evaluation import Evaluation as Section
from baton.runs.outcomes import EvaluationResult, GateVerdict

FIGURES = EvaluationResult(
    before={"perplexity": 20.0, "numeric_match": 0.25},
    after={"perplexity": 10.0, "numeric_match": 0.5, "broken": float("nan"), "grown": float("inf")},
    production={"perplexity": 9.0, "numeric_match": 0.5},
)

LINES: dict[str, tuple[str, str, float | None, bool, str]] = {
    "number held": ("perplexity", "<= 10", 10.0, True, "perplexity 10 is <= 10"),
    "number failed": ("perplexity", "< 10", 10.0, False, "perplexity 10 is not < 10"),
    "baseline": ("perplexity", "<= baseline", 20.0, True, "perplexity 10 is <= baseline = 20"),
    "a factor": ("perplexity", "<= baseline * 0.4", 8.0, False, "perplexity 10 is not <= baseline * 0.4 = 8"),
    "added": ("numeric_match", ">= baseline + 0.25", 0.5, True, "numeric_match 0.5 is >= baseline + 0.25 = 0.5"),
    "subtracted": ("perplexity", "<=baseline-9", 11.0, True, "perplexity 10 is <= baseline-9 = 11"),
    "production held": ("numeric_match", ">= production", 0.5, True, "numeric_match 0.5 is >= production = 0.5"),
    "production failed": ("perplexity", "<= production", 9.0, False, "perplexity 10 is not <= production = 9"),
    "strictly above": ("numeric_match", "> production", 0.5, False, "numeric_match 0.5 is not > production = 0.5"),
    "no number": ("broken", "> -1e9", -1e9, False, "broken nan is not > -1e+09"),
    "infinite": ("grown", "> 0", 0.0, False, "grown inf is > 0, but not finite"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line(case: str) -> None:
    figure, line, limit, held, words = LINES[case]
    (found,) = judge({figure: line}, FIGURES)
    assert (found.limit, found.held, found.words) == (limit, held, words)


UNMEASURED = EvaluationResult(
    before={"reward": None, "loss": 2.0, "bleu": 3.0, "chrf": float("inf")},
    after={"reward": None, "loss": None, "bleu": 4.0, "chrf": 1.0},
    production={"reward": 0.5, "loss": 2.0, "bleu": None, "chrf": 1.0},
    not_measured={"after": {"loss": "not finite"}},
)
NOBODYS = {
    "of neither model": ("reward", ">= baseline", "reward of the trained model was not measured: no row counted"),
    "against a number": ("reward", ">= -1e9", "reward of the trained model was not measured: no row counted"),
    "against production": ("reward", ">= production", "reward of the trained model was not measured: no row counted"),
    "with a reason": ("loss", "<= baseline", "loss of the trained model was not measured: not finite"),
    "of the other": ("bleu", ">= production", "bleu of the production model was not measured: no row counted"),
    "infinite limit": ("chrf", "<= baseline", "chrf 1 is <= baseline = inf, but not finite"),
}


@pytest.mark.parametrize(("figure", "line", "words"), NOBODYS.values(), ids=NOBODYS)
def test_a_line_does_not_hold_where_a_figure_was_not_measured(figure: str, line: str, words: str) -> None:
    (found,) = judge({figure: line}, UNMEASURED)
    assert (found.held, found.words) == (False, words)
    assert as_markdown(GateVerdict(passed=False, lines=[found])).count("not held") == 1


def test_what_was_not_measured_does_not_hold_without_a_production_model() -> None:
    (found,) = judge({"reward": ">= production"}, UNMEASURED.model_copy(update={"production": None}))
    assert not found.held


def test_a_line_against_production_holds_where_there_is_none_yet() -> None:
    first = FIGURES.model_copy(update={"production": None})
    (found,) = judge({"perplexity": "<= production"}, first)
    assert (found.held, found.limit) == (True, None)
    assert found.words == "perplexity 10: there is no production model yet"


def test_every_line_counts_and_those_that_fail_are_named() -> None:
    lines = judge({"perplexity": "<= 5", "numeric_match": ">= 0.5"}, FIGURES)
    assert [line.held for line in lines] == [False, True]
    assert GateVerdict(passed=False, lines=lines).failed == ["perplexity 10 is not <= 5"]


def test_a_figure_that_there_is_none_of_is_no_verdict() -> None:
    with pytest.raises(UserError, match="the trained model has no figure 'bleu'; it has broken, grown, numeric_match"):
        judge({"bleu": "> 1"}, FIGURES)
    with pytest.raises(UserError, match="the model before training has no figure 'broken'"):
        judge({"broken": "> baseline"}, FIGURES)


@pytest.mark.parametrize("line", ["10", "== 3", "<= best", "<= baseline *", "<= baseline / 2", ">= 1 or 2", ""])
def test_what_is_no_line_is_refused_with_the_recipe(line: str) -> None:
    with pytest.raises(ValidationError, match="is not a gate condition"):
        Section(gate={"perplexity": line})


def test_production_must_be_named_to_be_compared_with() -> None:
    with pytest.raises(ValidationError, match=r"gate\.loss: compares with production"):
        Section(gate={"loss": "<= production"})


NAMES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "its own": ("sft", {"gate": {"perplexity": "< 3"}}, None),
    "a metric": ("sft", {"gate": {"rougeL": "> 0.2"}, "metrics": ["rouge"]}, None),
    "a function": ("sft", {"gate": {"shortness": "> 0.2"}, "functions": ["own:shortness"]}, None),
    "a task": ("sft", {"gate": {"gsm8k.exact_match": "> 0.2"}, "tasks": {"names": ["gsm8k"]}}, None),
    "a reward function": ("grpo", {"gate": {"reward_numeric": "> 0.2"}}, None),
    "misspelt": ("sft", {"gate": {"perplexty": "< 3"}}, "no figure is called 'perplexty'; did you mean 'perplexity'?"),
    "not measured": ("sft", {"gate": {"bleu": "> 3"}}, "no figure is called 'bleu'; there will be loss, perplexity"),
    "of another method": ("reward", {"gate": {"perplexity": "< 3"}}, "there will be loss, accuracy, margin"),
    "twice compared": ("dpo", {"gate": {"reward_margin": "> baseline"}}, "compares with the baseline itself"),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_figure_that_there_will_not_be_is_known_with_the_recipe(case: str) -> None:
    method, section, message = NAMES[case]
    evaluation = Section(**section)
    if message is None:
        evaluation.check_gate(method)
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            evaluation.check_gate(method)
