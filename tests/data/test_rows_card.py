"""The card of the rows: the first of each side whatever they hold, and where all of them are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.data import split as card
from baton.pages.card import Card
from baton.runs.run import Run
from tests.data.splitting import split, write

ROWS = [{"text": f"row {number} \x07 \u202e 日本 " + "x" * number} for number in range(60)]


def _card(store: Path, found: dict[str, Any], cards: str = "rows") -> Card:
    run = Run.open(f"{store}/runs/run-1")
    document = run.require("recipe.json")
    document["recipe"]["tracking"] |= {"cards": cards, "mlflow_page": "https://mlflow.test"}
    run.put("recipe.json", document)
    run.put("tracking.json", {"mlflow": "sqlite:///x.db", "run_id": "abc", "experiment_id": "7"})
    return card.rows_card(run, found, "mine")


def test_it_begins_with_counts_and_rows_and_says_where_everything_is(tmp_path: Path) -> None:
    store = tmp_path / "store"
    found = split(str(store), write(tmp_path / "rows.jsonl", [*ROWS, b"{broken"]), max_rejected=0.5)
    made = _card(store, found)
    head, first = made.text.split("\n\n")[:2]
    assert head == f"train {found['train']} · eval {found['eval']} · test 0 · rejected 1"
    assert first.startswith('train\n1  {"text": "row ')
    assert r"\u0007" in first  # as JSON has it
    assert r"\u202e" in first  # and as the terminal is not to have it
    assert len(first.splitlines()) == 1 + card.SHOWN
    assert "run_name mine" in made.text
    assert found["rejected_uri"] in made.text
    address = made.facts["address"]
    lines = Path(f"{address}/train.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == made.facts["train"] == found["train"]
    assert made.facts["digest"] == found["digest"]
    assert made.facts["mlflow"] == "https://mlflow.test/#/experiments/7/runs/abc?workflowType=machine_learning"
    assert str(made.facts["mlflow"]) in made.text


def test_counts_alone_show_no_row(tmp_path: Path) -> None:
    store = tmp_path / "store"
    found = split(str(store), write(tmp_path / "rows.jsonl", ROWS))
    assert "日本" in _card(store, found).text
    made = _card(store, found, "counts")
    assert "日本" not in made.text
    assert "xxx" not in made.text
    assert f"train {found['train']}" in made.text


@pytest.mark.parametrize("filler", [b"x", "日".encode(), b"\xff"], ids=["text", "three bytes each", "not UTF-8"])
def test_rows_are_cut_wherever_that_is(filler: bytes, tmp_path: Path) -> None:
    lines = [filler * 5000, b"short", filler * 20, b"", b"last"]
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "eval.jsonl").write_bytes(b"")
    first = card.first_rows(str(tmp_path), ("train", "eval"))
    assert first["eval"] == []
    assert first["train"][0].endswith("…")
    assert len(first["train"][0].encode()) <= card.LONGEST + 3
    assert first["train"][1] == "short"
    assert first["train"][-1] == "last"


def test_no_more_than_the_first_rows_are_read(tmp_path: Path) -> None:
    with open(tmp_path / "train.jsonl", "wb") as file:
        file.write(b"row\n" * card.SHOWN)
        file.truncate(2**40)  # a hole of a terabyte, which nobody reads through
    assert card.first_rows(str(tmp_path), ("train",)) == {"train": ["row"] * card.SHOWN}
