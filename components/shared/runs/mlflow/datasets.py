"""A run's rows as inputs in MLflow: where they come from, their digest, columns and number, by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.data import SplitCounts
from baton.components.shared.runs.mlflow.connection import without_credentials

SIDES = ("train", "eval", "test")
"""Sides of a split; MLflow's context of an input has the same words."""
DIGEST = 12
"""Characters of the data's digest, of which MLflow takes 36 and shows all."""
TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}
"""Python's type → MLflow's."""
SCHEMES = {"s3": "s3", "http": "http", "https": "http", "hf": "hugging_face"}
"""Scheme of an address → MLflow's type of a source; others are `local`."""


def columns(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the columns of rows as MLflow's schema has them, each by the first row that has a value there."""
    found: dict[str, dict[str, Any]] = {}
    required: dict[str, bool] = {}
    rows = list(rows)
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        kind = next((kind for value in values if (kind := _kind(value))), None)
        found[name], required[name] = kind or {"type": "string"}, None not in values
    return [{"name": name, **kind, "required": required[name]} for name, kind in found.items()]


def _kind(value: Any) -> dict[str, Any] | None:
    if isinstance(value, list):
        items = next((kind for entry in value if (kind := _kind(entry))), None)
        return {"type": "array", "items": items} if items else None
    if isinstance(value, dict):
        properties = {str(name): {**kind, "required": True} for name, entry in value.items() if (kind := _kind(entry))}
        return {"type": "object", "properties": properties} if properties else None
    return {"type": TYPES[type(value)]} if type(value) in TYPES else None


def keys(recipe: Recipe, counts: SplitCounts) -> dict[str, tuple[str, str]]:
    """Returns name and digest of each side that has rows, by which MLflow knows it."""
    digest = str(counts.to_json().get("digest", ""))[:DIGEST]
    sizes = {side: getattr(counts, side) for side in SIDES}
    return {side: (f"{_name(recipe)}-{side}", digest) for side in SIDES if sizes[side]} if digest else {}


def inputs(recipe: Recipe, counts: SplitCounts) -> list[Any]:
    """Returns each side as an input of a tracking run."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    kind, source = _source(recipe)
    schema = json.dumps({"mlflow_colspec": counts.columns}) if counts.columns else None
    found = []
    for side, (name, digest) in keys(recipe, counts).items():
        profile = json.dumps({"num_rows": getattr(counts, side), "digest": counts.to_json().get("digest")})
        dataset = Dataset(name, digest, kind, source, schema=schema, profile=profile)
        found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", side)]))
    return found


def _name(recipe: Recipe) -> str:
    """Returns the data's name: of one source the end of its address, of several the recipe's."""
    addresses = [source.uri for source in recipe.data.sources]
    if len(addresses) > 1:
        return recipe.name
    address = addresses[0].partition("?")[0].rstrip("/")
    if address.startswith("hf://datasets/"):
        return "/".join(address.removeprefix("hf://datasets/").split("/")[:2])
    return address.rpartition("/")[2].rpartition(":")[2] or recipe.name


def _source(recipe: Recipe) -> tuple[str, str]:
    """Returns type and description of where the rows come from, as MLflow's own sources write them."""
    addresses = [without_credentials(source.uri) for source in recipe.data.sources]
    first = addresses[0]
    kind = SCHEMES.get(first.partition("://")[0], "local") if len(addresses) == 1 else "local"
    if kind == "hugging_face" and not first.startswith("hf://datasets/"):
        kind = "local"
    if kind == "hugging_face":
        path, _, query = first.removeprefix("hf://datasets/").partition("?")
        return kind, json.dumps({"path": "/".join(path.split("/")[:2]), "split": query.partition("split=")[2] or None})
    key = "url" if kind == "http" else "uri"
    return kind, json.dumps({key: ", ".join(addresses)})
