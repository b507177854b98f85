"""The checks in the split stage: what a run keeps of them, and what they change."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.data.split import split_data
from baton.errors import UserError
from baton.recipe import load
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

TEXTS = [f"row {number} says that {number} and {number + 1} make {2 * number + 1}" for number in range(200)]
ROWS = [{"text": text} for text in (*TEXTS[:150], "cafÃ© au lait, 150 of them", TEXTS[3], *TEXTS[150:])]
"""200 good rows; in line 151 mojibake, in line 152 line 4 again."""


def split(folder: Path, rows: list[Any], name: str = "run-1", **data: Any) -> dict[str, Any]:
    """Split rows into the store beside them."""
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = {
        "name": "tiny",
        "store": str(folder / "store"),
        "model": {"base": "org/model"},
        "data": {"source": str(source), **data},
        "tracking": {"mlflow": None},
    }
    return split_data(load.validate(recipe, origin="r.yaml"), name)


def written(folder: Path, found: dict[str, Any]) -> dict[str, list[str]]:
    """The texts of each side."""
    storage, prefix = Storage(str(folder / "store")), f"data/{found['digest']}/split"
    manifest = read_manifest(storage, prefix)
    assert manifest is not None
    lines = {
        side: storage.read(manifest.path(prefix, f"{side}.jsonl")).splitlines() for side in ("train", "eval", "test")
    }
    return {side: [json.loads(line)["text"] for line in found_lines] for side, found_lines in lines.items()}


def in_run(folder: Path, name: str, run: str = "run-1") -> str:
    """A document of the run."""
    return (folder / "store" / "runs" / run / name).read_text("utf-8")


def test_what_a_run_keeps(tmp_path: Path):
    found = split(tmp_path, ROWS)

    quality = json.loads(in_run(tmp_path, "quality.json"))
    assert {name: check["rows"] for name, check in quality["checks"].items() if check["verdict"] == "warn"} == {
        "encoding": 1, "duplicates": 1,
    }  # fmt: skip
    assert quality["rows"] == {
        "train": found["train"], "eval": found["eval"], "test": 0, "rejected": 0, "looked_at": 202, "mended": 0,
        "dropped": 0,
    }  # fmt: skip
    lines = [json.loads(line) for line in in_run(tmp_path, "quality.jsonl").splitlines()]
    assert [(line["check"], line["outcome"], line["line"]) for line in lines] == [
        ("encoding", "kept", 151), ("duplicates", "kept", 152),
    ]  # fmt: skip
    assert quality["findings_uri"] == str(tmp_path / "store/runs/run-1/quality.jsonl")
    assert in_run(tmp_path, "data-quality.html") == found["page"]
    assert "Check duplicates and encoding before you pay for a GPU." in found["page"]


def test_only_a_fix_changes_the_rows_and_their_digest(tmp_path: Path):
    checks = json.loads(in_run_quality(tmp_path))["checks"]
    off = split(tmp_path, ROWS, "off", quality={name: "off" for name in checks if name != "rejected"})
    warn = split(tmp_path, ROWS, "warn")
    fixed = split(tmp_path, ROWS, "fixed", quality={"encoding": "fix", "duplicates": "fix"})

    assert off["digest"] == warn["digest"] != fixed["digest"]
    assert (warn["rows"], fixed["rows"], fixed["rejected"]) == (202, 201, 0)
    before, after = written(tmp_path, warn), written(tmp_path, fixed)
    assert sorted([*after["train"], *after["eval"]]) == sorted([*TEXTS, "café au lait, 150 of them"])
    for side in ("train", "eval"):  # no row that was left alone moves
        assert set(before[side]) & set(TEXTS) == set(after[side]) & set(TEXTS)


def in_run_quality(folder: Path) -> str:
    """The `quality.json` of a split with the defaults."""
    split(folder, ROWS, "default")
    return in_run(folder, "quality.json", "default")


def test_what_fails_is_written_first(tmp_path: Path):
    with pytest.raises(UserError) as error:
        split(tmp_path, ROWS, quality={"encoding": "fail", "duplicates": "fail"})

    assert str(error.value) == (
        "data.quality.encoding: found in 1 of 202 rows; the first is rows.jsonl line 151: decoded with the wrong "
        "table: 'é au lait, 150 of th' is meant; data.quality.duplicates: found in 1 of 202 rows; the first is "
        "rows.jsonl line 152: the same as line 4 (eval). "
        f"All are in {tmp_path}/store/runs/run-1/quality.jsonl. Fix the data, or set "
        "data.quality.encoding and data.quality.duplicates to warn or fix."
    )
    assert "Do not train on this yet" in in_run(tmp_path, "data-quality.html")
    assert not (tmp_path / "store/runs/run-1/data.json").exists()


def test_dropped_rows_are_not_rejected_rows(tmp_path: Path):
    """A third of the rows is dropped, with no room for rejected ones."""
    short = [{"text": "ok"} for _ in range(100)]

    found = split(tmp_path, [*ROWS, *short], quality={"empty": "fix"}, max_rejected=0.0)

    assert (found["rows"], found["rejected"]) == (202, 0)
    assert json.loads(in_run(tmp_path, "quality.json"))["rows"]["dropped"] == 100


def test_nothing_is_left(tmp_path: Path):
    with pytest.raises(UserError, match=r"no row of data\.source .* is left: data\.quality dropped all 3 of them\."):
        split(tmp_path, [{"text": "a"}] * 3, quality={"empty": "fix"})


def test_a_given_split_with_the_same_rows_on_both_sides(tmp_path: Path):
    """Leakage goes from training; the held-out rows stay as they are."""
    train, held_out = (
        [{"text": text} for text in TEXTS],
        [{"text": text} for text in (*TEXTS[:3], "another row of text")],
    )
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out), encoding="utf-8")
    sources = [
        {"uri": str(tmp_path / "rows.jsonl"), "side": "train"},
        {"uri": str(tmp_path / "eval.jsonl"), "side": "eval"},
    ]

    found = split(tmp_path, train, source=sources, quality={"leakage": "fix"})

    sides = written(tmp_path, found)
    assert sides["eval"] == [row["text"] for row in held_out]
    assert sides["train"] == TEXTS[3:]
    lines = [json.loads(line) for line in in_run(tmp_path, "quality.jsonl").splitlines()]
    assert [line["reason"] for line in lines] == [
        f"like the held-out eval.jsonl line {line} (eval)" for line in (1, 2, 3)
    ]


def test_weights_repeat_no_finding(tmp_path: Path):
    source = [{"uri": str(tmp_path / "rows.jsonl"), "weight": 3}]

    found = split(tmp_path, ROWS, source=source)

    quality = json.loads(in_run(tmp_path, "quality.json"))
    assert quality["checks"]["duplicates"]["rows"] == 1
    assert quality["rows"]["train"] == found["train"] == 3 * (202 - found["eval"])
