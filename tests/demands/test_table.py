"""`docs/internals/demands.md` is current, and each demand has both halves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demands.table import ADDRESS, KINDS, Demand, demands, markdown

PAGE = Path(__file__).parents[2] / "docs/internals/demands.md"


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs` and commit it"


@pytest.mark.parametrize("demand", [pytest.param(demand, id=demand.module) for demand in demands()])
def test_a_demand_has_both_halves(demand: Demand) -> None:
    assert demand.kind in KINDS
    assert all(ADDRESS.fullmatch(issue) for issue in demand.issues)
    assert demand.symptom.endswith(".")
    assert f"_{demand.issues[0].rpartition('/')[2]}_" in demand.module
    halves = {name.split("_")[1] for name in demand.tests}
    assert halves == {"upstream", "baton"}


def test_no_report_is_there_twice() -> None:
    issues = [issue for demand in demands() for issue in demand.issues]
    assert len(set(issues)) == len(issues)
