"""The way of the rows: 125 shapes of public data sets × methods × split rules, against what they came to.

Each case runs both stages on a source of 40 rows and records digests of the split, of each file that it wrote, of the
rejected rows, of the quality document, of the tokens and of their Arrow files. `make golden` writes `data_way.json`
anew: a changed line is a run in the middle, or a cache, that no longer fits. A library that renders or tokenizes in
another way changes `tokens` and `arrow` alone.

The quick table has each shape with its own method and one of the rules in turn. The slow one has each shape with all
methods, and some shapes with all methods and all rules, each way as one digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.data.split import split_data
from baton.data.tokenize import tokenize_run
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.methods import SPECS
from baton.store.manifest import read_manifest
from baton.store.storage import Storage
from tests.support import tiny

GOLDEN = Path(__file__).parent / "data_way.json"
SHAPES: dict[str, dict[str, Any]] = {
    shape["name"]: shape
    for shape in map(json.loads, (Path(__file__).parents[1] / "data/public_shapes.jsonl").open("rb"))
}
METHODS: dict[str, dict[str, Any]] = {name: {} for name in SPECS} | {
    "grpo": {"rewards": ["length"], "num_generations": 2},
    "rloo": {"rewards": ["length"], "num_generations": 2},
    "distillation": {"teacher": "./base"},
}
RULES: dict[str, dict[str, Any]] = {
    "share": {},
    "counted": {"split": {"eval": 5}},
    "test": {"split": {"eval": 0.2, "test": 0.2}},
    "stratified": {"split": {"eval": 0.3, "stratify_by": "golden_kind"}},
    "grouped": {"split": {"eval": 0.3, "group_by": "golden_group"}},
    "column": {"split": {"column": "golden_side"}},
    "sampled": {"max_samples": 30, "shuffle": True},
    "weighted": {"source": [{"uri": "./rows.jsonl", "weight": 1.6}]},
    "two sides": {"source": [{"uri": "./rows.jsonl", "side": "train"}, {"uri": "./held.jsonl", "side": "eval"}]},
    "shorter": {"max_length": 64, "max_samples": 30},
    "checked": {
        "quality": dict.fromkeys(("duplicates", "leakage", "encoding", "emails", "turns", "truncation"), "fix")
    },
    "joined": {"render_as": "text", "separator": "###", "train_on": "all"},
    "kept": {"extra_columns": ["golden_kind"], "split": {"eval": 0.3}},
}
CROSSED = ("tatsu-lab/alpaca", "HuggingFaceH4/ultrafeedback_binarized", "openai/gsm8k")
"""Shapes that all rules are tried on with all methods."""
QUICK = {
    f"{name} · {shape['method']} · {rule}": (name, shape["method"], rule)
    for (name, shape), rule in zip(SHAPES.items(), list(RULES) * len(SHAPES), strict=False)
}
SLOW = {
    f"{name} · all methods · {rule}": (name, rule)
    for name in SHAPES
    for rule in (RULES if name in CROSSED else ("share",))
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, the same bytes on every machine: its weights are zeros."""
    folder = Path(tmp_path_factory.mktemp("golden"), "base")
    tiny.make_chat_base(folder)
    weights = {name: torch.zeros_like(value) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def golden() -> Iterator[dict[str, Any]]:
    """Results kept from the last look; `make golden` replaces them."""
    kept = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    yield kept
    if os.environ.get("BATON_GOLDEN"):
        lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def rows(shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields 40 rows of a shape, two of them alike, with columns for each rule."""
    for number in range(40):
        row = json.loads(re.sub(r"(1\+1|Once|Hello)", rf"\g<1>{number % 38}", json.dumps(shape["row"])))
        yield row | {
            "golden_kind": "odd" if number % 3 else "even",
            "golden_group": f"g{number // 4}",
            "golden_side": ("train", "test", "train", "validation")[number % 4],
        }


def short(data: bytes) -> str:
    """Returns the beginning of bytes' SHA-256."""
    return hashlib.sha256(data).hexdigest()[:12]


def way(folder: Path, base: Path, name: str, method: str, rule: str) -> dict[str, str]:
    """Takes a shape's rows through both stages, and returns the digests of all that they wrote."""
    lines = [json.dumps(row) for row in rows(SHAPES[name])]
    (folder / "rows.jsonl").write_text("\n".join([*lines, '{"broken": ']) + "\n", encoding="utf-8")
    (folder / "held.jsonl").write_text("\n".join(lines[:5]).replace("1+", "2+") + "\n", encoding="utf-8")
    (folder / "base").symlink_to(base)
    data = {
        "source": "./rows.jsonl",
        "max_length": 96,
        "max_rejected": 1,
        "workers": 1,
        "split": {"eval": 0.25},
        **RULES[rule],
    }
    own = {method: METHODS[method]} if METHODS[method] else {}
    document = {
        "name": "golden",
        "seed": 7,
        "store": "store",
        "model": {"base": "base"},
        "data": data,
        "training": {"method": method, "batch_size": 2, "max_steps": 2, **own},
        "tracking": {"mlflow": None},
    }
    storage, found = Storage("store"), {}
    try:
        split = split_data(load.validate(document, origin="golden.yaml"), "golden")
        manifest = read_manifest(storage, f"data/{split['digest']}/split")
        assert manifest is not None
        found["split"] = split["digest"][:12]
        found |= {file: entry["sha256"][:12] for file, entry in sorted(manifest.files.items())}
        for path in ("rejected.jsonl", "quality.json"):
            with contextlib.suppress(FileNotFoundError):
                found[path] = short(storage.read(f"runs/golden/{path}").replace(str(folder).encode(), b"."))
        tokens = tokenize_run("store/runs/golden")
        found["tokens"] = tokens["digest"][:12]
        manifest = read_manifest(storage, f"data/{tokens['digest']}/tokens")
        assert manifest is not None
        arrows = sorted(
            (file.rpartition("-")[0], entry["sha256"]) for file, entry in manifest.files.items() if ".arrow" in file
        )
        found["arrow"] = short(repr(arrows).encode())
    except UserError:
        found["refused"] = "in tokenize" if "split" in found else "in split"
    return found


def compare(case: str, found: dict[str, str], golden: dict[str, Any]) -> None:
    """Compares a case with what it came to, or writes that down."""
    if os.environ.get("BATON_GOLDEN"):
        golden[case] = found
    assert found == golden.get(case), "run `make golden` and read the diff"


@pytest.mark.parametrize("case", QUICK)
def test_rows_go_the_way_they_went(case: str, base: Path, golden: dict[str, Any], tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        compare(case, way(tmp_path, base, *QUICK[case]), golden)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_rows_go_every_way_they_went(case: str, base: Path, golden: dict[str, Any], tmp_path: Path) -> None:
    name, rule = SLOW[case]
    found = {}
    for method in METHODS:
        folder = tmp_path / method
        folder.mkdir()
        with contextlib.chdir(folder):
            parts = way(folder, base, name, method, rule)
        found[method] = parts["refused"] if "refused" in parts else short(json.dumps(parts).encode())
    compare(case, found, golden)


def test_one_more_character_in_the_rows_is_another_way(
    base: Path, golden: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, (name, method, rule) = next(iter(QUICK.items()))
    monkeypatch.setitem(SHAPES, name, json.loads(json.dumps(SHAPES[name]).replace("1+1", "1+1 +")))
    with contextlib.chdir(tmp_path):
        found = way(tmp_path, base, name, method, rule)
    assert {part for part in found if found[part] != golden[case][part]} >= {"split", "train.jsonl", "tokens", "arrow"}


def test_all_shapes_methods_and_rules_are_there(golden: dict[str, Any]) -> None:
    assert golden.keys() == QUICK.keys() | SLOW.keys()
    whole = {QUICK[case][0] for case, found in golden.items() if "arrow" in found}
    assert whole == {name for name in SHAPES if "expected" in SHAPES[name]}
    assert {rule for _, _, rule in QUICK.values()} == RULES.keys()
    taken = {method for case in SLOW for method, found in golden[case].items() if not found.startswith("in ")}
    assert taken == METHODS.keys()
