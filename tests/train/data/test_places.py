"""Where rows of tokens come from: each is of the lines that its tokens say, however it was cut, joined or left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.data import tokenize
from baton.data.split import split_data
from baton.data.tokenize import tokenize_run
from baton.models import loading, trained
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import ORIGINS
from baton.runs.run import Run
from baton.store.manifest import read_manifest
from baton.train import guard

END = "<end>"
"""What each text is followed by in tokens."""
Texts = dict[tuple[str, int], str]
"""File and line of a row → its text."""


def plain(number: int) -> dict[str, str]:
    """A row that no other row's text contains."""
    words = "rectangle " * (number % 7)
    return {"prompt": f"{number} is the area of", "completion": f" {words}{number * number}."}


def pair(number: int) -> dict[str, str]:
    """A row of which two are made."""
    return {"prompt": f"{number}?", "chosen": f" yes {number}", "rejected": f" no {number}"}


def prepared(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: Callable[[int], dict[str, str]] = plain,
    **changes: dict[str, Any],
) -> tuple[Run, Recipe, Texts]:
    """A run of two files to train on, with lines that cannot be used between those that can, tokenized in segments."""
    monkeypatch.setattr(tokenize, "LEAST", 900)
    texts: Texts = {}
    for name, numbers in (("a", range(40)), ("b", range(40, 80)), ("held", range(80, 81))):
        lines = []
        for number in numbers:
            if number % 11 == 5:
                lines.append("{broken" if number % 2 else json.dumps({"other": 1}))
            lines.append(json.dumps(row(number)))
            if name != "held":
                texts[f"{folder}/{name}.jsonl", len(lines)] = "".join(row(number).values()) + END
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sources = [{"uri": f"{folder}/{name}.jsonl", "side": "train"} for name in ("a", "b")]
    document = {
        "name": "tiny",
        "store": str(folder / "store"),
        "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {
            "source": [*sources, {"uri": f"{folder}/held.jsonl", "side": "eval"}],
            "separator": "",
            "max_length": 48,
            "max_rejected": 0.5,
            **changes.get("data", {}),
        },
        "training": {"guard": {}, **changes.get("training", {})},
        "tracking": {"mlflow": None},
    }
    recipe = load.validate(document, origin="test")
    run = Run.open(split_data(recipe, "run")["run_uri"])
    tokenize_run(run.uri)
    return run, recipe, texts


def rows_of(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Every row to train on, its tokens as text."""
    tokens = trained.tokens_folder(run, str(folder / "tokens"))
    tokenizer = loading.load_tokenizer(f"{tokens}/tokenizer", trust_remote_code=False)
    rows = trained.open_rows(f"{tokens}/train")
    end = tokenizer.eos_token
    return [{**row, "said": tokenizer.decode(row["input_ids"]).replace(end, END)} for row in rows]


@pytest.mark.parametrize("cut", ["fix", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_row_is_of_its_line(cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"max_length": 16, "quality": {"truncation": cut, "truncated_share": 0.99}}
    run, recipe, texts = prepared(tmp_path, monkeypatch, data=data)
    rows = rows_of(run, tmp_path)
    assert (len(rows) < len(texts)) == (cut == "fix"), "some are left out"
    for number, row in enumerate(rows):
        (place,) = guard.locate_rows(run, recipe, [number])
        assert texts[place.file, place.line].startswith(row["said"])
    assert len(guard.locate_rows(run, recipe, range(len(rows)))) == len(rows)


@pytest.mark.parametrize("packing", ["best-fit", pytest.param(True, marks=pytest.mark.slow)])
def test_a_sequence_is_of_all_its_lines(packing: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, recipe, texts = prepared(tmp_path, monkeypatch, data={"packing": packing})
    rows = rows_of(run, tmp_path)
    assert len(rows) < len(texts)
    several = 0
    for number, row in list(enumerate(rows))[::5]:
        named = [texts[place.file, place.line] for place in guard.locate_rows(run, recipe, [number])]
        several += len(named) > 1
        if packing == "best-fit":
            assert len(named) == len(row["seq_lengths"])
            assert sum(map(len, named)) == len(row["said"])
            assert all(text in row["said"] for text in named)
        else:
            assert row["said"] in "".join(named)
            assert row["said"] not in "".join(named[1:])
            assert row["said"] not in "".join(named[:-1])
    assert several > len(rows) // 10


@pytest.mark.slow
def test_both_rows_of_a_pair_are_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, recipe, texts = prepared(tmp_path, monkeypatch, pair, training={"method": "kto"})
    found = [guard.locate_rows(run, recipe, [number]) for number in range(2 * len(texts))]
    assert [(place.file, place.line) for (place,) in found] == [place for place in texts for _ in range(2)]


def test_without_its_origins_a_run_names_lines_of_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, recipe, _ = prepared(tmp_path, monkeypatch)
    run.storage.remove(run.path(ORIGINS))
    (place,) = guard.locate_rows(run, recipe, [41])
    assert place.file.endswith("/split/train.jsonl")
    assert place.line == 42


@pytest.mark.parametrize("packing", [pytest.param("best-fit", marks=pytest.mark.slow), False])
def test_of_tokens_of_an_older_baton_what_can_be_told_is(
    packing: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was left out or joined, a row's place tells its line; else the row itself is named."""
    run, recipe, texts = prepared(tmp_path, monkeypatch, data={"packing": packing})
    prefix = run.require("tokens.json")["prefix"]
    manifest = json.loads(run.storage.read(f"{prefix}/manifest.json"))
    del manifest["meta"]["first_lines"]
    run.storage.write(f"{prefix}/manifest.json", json.dumps(manifest).encode())
    assert read_manifest(run.storage, prefix)
    (place,) = guard.locate_rows(run, recipe, [0])
    if packing:
        assert place.file.endswith(".arrow")
    else:
        assert (place.file, place.line) == next(iter(texts))


def test_a_run_without_a_guard_keeps_no_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, *_ = prepared(tmp_path, monkeypatch, training={"guard": None})
    assert ORIGINS not in run.storage.list(run.path())
