"""A team's prices of devices, from the file or address in `BATON_PRICES`, for a budget of money without a price."""

import copy
import os
from typing import Any

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.budget import AMOUNT, GPU_HOURS
from baton.source import origin

VARIABLE = "BATON_PRICES"
CPU = "cpu"


def apply_prices(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe, not checked yet, with the price of its devices; one that is given stays.

    Prices are by a value of `resources.node_selector`, such as a GPU's product, else by `resources.accelerator`; `cpu`
    is of pods without one.
    """
    budget, resources = document.get("budget"), document.get("resources") or {}
    address = os.environ.get(VARIABLE)
    if not address or not isinstance(budget, dict) or not isinstance(resources, dict) or "price" in budget:
        return document
    amount = AMOUNT.fullmatch(str(budget.get("limit")))
    if not amount or amount[2] == GPU_HOURS:
        return document
    listed = load.parse(origin.find(address).text, origin=address)
    prices, quoted = listed.get("prices"), listed.get("currency")
    if not isinstance(prices, dict) or not isinstance(quoted, str):
        raise UserError(
            f"{VARIABLE}: {address} has no prices with a currency.",
            remedy="Write for example {currency: USD, prices: {cpu: 0.05, nvidia.com/gpu: 2.5}}.",
        )
    if quoted != amount[2]:
        raise UserError(
            f"budget.limit is {budget['limit']}, and {address} has prices in {quoted}.",
            remedy=f"Give the limit in {quoted}, or budget.price.",
        )
    selected = resources.get("node_selector") or {}
    accelerator = resources.get("accelerator", "nvidia.com/gpu") if resources.get("gpus") else CPU
    keys = [*(selected.values() if isinstance(selected, dict) else ()), accelerator]
    price = next((prices[key] for key in keys if key in prices), None)
    if price is None:
        raise UserError(
            f"{address} has no price of {' or '.join(map(str, keys))}, but of {', '.join(map(str, prices))}.",
            remedy="Give budget.price.",
        )
    if isinstance(price, dict) and not resources.get("capacity"):
        price = price.get("on_demand")  # nothing tells spot nodes apart
    document = copy.deepcopy(document)
    document["budget"]["price"] = price
    return document
