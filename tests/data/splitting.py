"""Splitting rows in a test: write them, split them, read the sides back."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from baton.data import normalize
from baton.data.schema import ColumnMapping
from baton.data.split import split_data
from baton.errors import RowError
from baton.recipe import load
from baton.store import bundle
from baton.store.manifest import read_manifest
from baton.store.storage import Storage


def write(path: Path, rows: list[Any]) -> str:
    """Write rows as JSON lines; bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def split(
    store: str, source: Any, name: str = "run-1", *, seed: int = 7, method: str = "sft", **data: Any
) -> dict[str, Any]:
    """Split a source into a store."""
    own = {"grpo": {"rewards": ["length"]}} if method == "grpo" else {}
    recipe = {
        "name": "tiny",
        "seed": seed,
        "store": store,
        "model": {"base": "org/model"},
        "data": {"source": source, **data},
        "training": {"method": method, **own},
        "tracking": {"mlflow": None},
    }
    return split_data(load.validate(recipe, origin="r.yaml"), name)


def sides(store: str, found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Read both sides of a split back."""
    storage, prefix = Storage(store), f"data/{found['digest']}/split"
    manifest = read_manifest(storage, prefix)
    assert manifest is not None
    assert bundle.verify(storage, prefix, manifest) == []
    return {
        side: [json.loads(line) for line in storage.read(manifest.path(prefix, f"{side}.jsonl")).splitlines()]
        for side in ("train", "eval", "test")
    }


def normalized(row: dict[str, Any], layout: ColumnMapping, **options: bool) -> Any:
    """Bring a row to its method's shape, or return the reason why that cannot be."""
    try:
        return normalize.normalize_row(row, layout, **options)
    except RowError as error:
        return str(error)


def rejected(store: str, name: str = "run-1") -> list[dict[str, Any]]:
    """Read the rows that were kept as rejected."""
    return [json.loads(line) for line in Storage(store).read(f"runs/{name}/rejected.jsonl").splitlines()]


def texts(rows: list[dict[str, Any]]) -> Counter[str]:
    """The texts of rows, and how often they are there."""
    return Counter(row["text"] for row in rows)


ROWS = [{"text": f"row {number}"} for number in range(300)]
GOOD = st.builds(lambda text: {"text": f"t{text}"}, st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
BAD = st.sampled_from([b"{", b"[]", b"\xff", b'{"text": 1}', b'{"text": " "}', b'{"text": "\\ud800"}', b'{"b": "x"}'])
