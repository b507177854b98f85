"""A team's prices for budgets without one: which device's is taken, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.errors import UserError
from baton.recipe import load
from baton.source import prepare, prices

H100 = {"nvidia.com/gpu.product": "H100"}
LISTED = {"cpu": 0.05, "nvidia.com/gpu": 2.5, "H100": {"spot": 1.1, "on_demand": 3.2}}


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of prices that the variable names."""
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump({"currency": "USD", "prices": LISTED}), encoding="utf-8")
    monkeypatch.setenv(prices.VARIABLE, str(path))
    return path


PRICED: dict[str, tuple[dict[str, Any], Any]] = {
    "no GPU": ({}, 0.05),
    "any GPU": ({"gpus": 2}, 2.5),
    "one word": ({}, 0.05),
    "a product": ({"gpus": 1, "node_selector": H100, "capacity": "spot"}, {"spot": 1.1, "on_demand": 3.2}),
    "a product of unknown capacity": ({"gpus": 1, "node_selector": H100}, 3.2),
    "another product": ({"gpus": 1, "node_selector": {"nvidia.com/gpu.product": "L4"}}, 2.5),
    "another selector": ({"gpus": 1, "node_selector": {"zone": "a", **H100}}, 3.2),
}


@pytest.mark.parametrize("case", PRICED)
def test_the_price_of_a_device(case: str, listed: Path) -> None:
    resources, price = PRICED[case]
    limit = "40USD" if case == "one word" else "40 USD"
    document = {"budget": {"limit": limit}, "resources": resources}
    assert prices.apply_prices(document)["budget"] == {"limit": limit, "price": price}
    assert document["budget"] == {"limit": limit}, "the given document stays as it is"


LEFT: dict[str, dict[str, Any]] = {
    "no budget": {},
    "a price of its own": {"budget": {"limit": "40 USD", "price": 7}},
    "hours": {"budget": {"limit": "12 gpu-hours"}},
    "a time": {"budget": {"limit": "6h"}},
    "a moment": {"budget": {"by": "2026-12-01T18:00Z"}},
    "a mistake": {"budget": "40 USD"},
}


@pytest.mark.parametrize("case", LEFT)
def test_a_recipe_that_needs_no_price_is_left_as_it_is(case: str, listed: Path) -> None:
    assert prices.apply_prices(LEFT[case]) == LEFT[case]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no device": ({"currency": "USD", "prices": {"H100": 1}}, {"gpus": 1}, "no price of nvidia.com/gpu, but of H100"),
    "no currency": ({"prices": LISTED}, {}, "has no prices with a currency"),
    "no prices": ({"currency": "USD", "cpu": 1}, {}, "has no prices with a currency"),
    "another currency": ({"currency": "EUR", "prices": LISTED}, {}, "budget.limit is 40 USD, and .* in EUR"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_list_that_does_not_price_the_recipe_is_refused(case: str, listed: Path) -> None:
    content, resources, message = REFUSED[case]
    listed.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        prices.apply_prices({"budget": {"limit": "40 USD"}, "resources": resources})


def test_a_recipe_that_is_read_has_its_price(listed: Path, tmp_path: Path) -> None:
    recipe = prepare.load("quickstart", ["budget.limit=4 USD"], store=str(tmp_path)).recipe
    assert recipe.budget
    assert recipe.budget.price == 0.05
    assert load.to_yaml(recipe, only_set=True).count("price: 0.05") == 1
