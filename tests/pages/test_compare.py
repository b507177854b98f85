"""Runs side by side: which is better, in which settings they differ, and whether they are the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.pages import compare
from tests.support.pages import read


def _other(full_report: Any) -> Any:
    report = full_report(num_steps=120)
    evaluation = report.evaluation.model_copy(
        update={"after": {"loss": 2.9, "perplexity": 18.2}, "better": {"loss": "lower"}}
    )
    recipe = report.recipe_yaml.replace("chunks: 4", "chunks: 4\n  learning_rate: 0.001")
    newest = report.newest.model_copy(update={"digest": "f" * 64})
    return replace(report, run="second", evaluation=evaluation, recipe_yaml=recipe, newest=newest)


def test_losses_lie_over_each_other_and_the_better_run_is_named(full_report: Any) -> None:
    first, second = full_report(), _other(full_report)
    page = read(compare.render([first, second]))
    assert "second has the lowest evaluation loss, 2.90. 1 setting differs." in page.text
    assert {name: len(points) for name, points in page.curves("training loss").items()} == {
        first.run: 240,
        "second": 120,
    }
    assert page.curves("evaluation loss")["second"][-1][0] == 120
    rows = {row.name: row.best for row in compare.figure_rows([first, second])}
    assert rows == {"loss": 1, "perplexity": 1}
    assert compare.settings([first, second]) == [compare.Setting("training.learning_rate", ["", "0.001"])]
    assert "Write a haiku about the sea." in page.text


def test_equal_runs_are_bit_identical(full_report: Any) -> None:
    page = read(compare.render([full_report(), replace(full_report(), uri="s3://other/runs/x")]))
    assert "Bit-identical: the newest checkpoints of 2 runs have the same state digest." in page.text
    assert "None: the recipes are the same." in page.text
    assert "s3://other/runs/x" in [curve["name"] for curve in page.plot("training loss")["curves"]]


def test_a_run_without_anything_yet(full_report: Any, empty_report: Any) -> None:
    page = read(compare.render([full_report(), replace(empty_report(), run="none")]))
    assert "2 runs side by side." in page.text
    assert list(page.curves("training loss")) == [full_report().run]


def test_hostile_text_stays_text(full_report: Any) -> None:
    hostile = "</table><script>alert(1)</script>"
    report = replace(_other(full_report), run=hostile, recipe_yaml=f'name: "{hostile}"\n')
    assert hostile in read(compare.render([full_report(), report])).text
