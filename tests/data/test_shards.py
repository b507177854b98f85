"""Shards: segments dealt to several processes, whose tokens are those of one, whatever becomes of a shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.data import tokenize as tokenization
from baton.data.tokenize import SideSegment
from baton.runs.run import Run
from tests.data.test_segments import RUN, contents, manifest_of, prepared, tokenize

SHARD = RUN.replace("tokenize_run", "tokenize_shard").replace("(sys.argv[1])", "(sys.argv[1], 2, 2)")


def sharded(folder: Path, of: int) -> Run:
    """A run whose tokens so many shards have made, the last one first, and then the join."""
    folder.mkdir()
    run = prepared(folder)
    for index in range(of, 0, -1):
        tokenization.tokenize_shard(run.uri, index, of)
    assert run.raw("tokens.json") is None
    assert len([record for record in run.records() if record.stage == "tokenize-shard"]) == of
    tokenization.tokenize_run(run.uri)
    return run


def test_any_number_of_shards_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    monkeypatch.setattr(tokenization, "LEAST", 2000)
    (tmp_path / "0").mkdir()
    one = prepared(tmp_path / "0")
    tokenization.tokenize_run(one.uri)
    made = capsys.readouterr().out.count('"event": "tokenized"')
    expected = {**manifest_of(one).meta, "files": None}
    for of in (1, 2, 5):
        run = sharded(tmp_path / str(of), of)
        assert capsys.readouterr().out.count('"event": "tokenized"') == made > 10, "each segment once, none by the join"
        assert contents(run) == contents(one)
        assert {**manifest_of(run).meta, "files": None} == expected
        assert run.require("tokens.json")["digest"] == one.require("tokens.json")["digest"]


def test_borders_that_depend_on_the_number_of_shards_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before: the same code, but for the cut."""
    monkeypatch.setattr(tokenization, "LEAST", 2000)
    cut = tokenization.cut
    runs = []
    for of in (1, 2):

        def depending(path: str, side: str, of: int = of) -> list[SideSegment]:
            pieces = cut(path, side)
            groups = [pieces[at : at + of] for at in range(0, len(pieces), of)]
            return [replace(group[0], index=n, end=group[-1].end) for n, group in enumerate(groups)]

        monkeypatch.setattr(tokenization, "cut", depending)
        runs.append(sharded(tmp_path / str(of), of))
    one, two = runs
    assert manifest_of(one).meta["train"] == manifest_of(two).meta["train"]
    assert contents(one) != contents(two)


def test_segments_are_dealt_once_each(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"x\n")
    wanted = tokenization.cut(str(path), "train") * 7
    for of in (1, 2, 5, 9):
        hands = [tokenization.dealt(wanted, index, of) for index in range(1, of + 1)]
        assert sum(map(len, hands)) == len(wanted)
        assert max(map(len, hands)) - min(map(len, hands)) <= 1
    assert tokenization.dealt(wanted, 0, 2) == []


def test_a_shard_whose_segments_are_there_makes_nothing_and_the_join_what_a_lost_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    monkeypatch.setattr(tokenization, "LEAST", 2000)
    run = prepared(tmp_path)
    tokenization.tokenize_shard(run.uri, 0, 2)
    assert '"event": "tokenized"' not in capsys.readouterr().out, "the tokenizer alone"
    tokenization.tokenize_shard(run.uri, 1, 2)
    first = capsys.readouterr().out.count('"event": "tokenized"')
    before = run.storage.find("data")
    tokenization.tokenize_shard(run.uri, 1, 2)
    assert '"event": "tokenized"' not in capsys.readouterr().out
    assert run.storage.find("data") == before, "a shard that is started again when it was done writes nothing"
    tokenization.tokenize_run(run.uri)
    assert first - capsys.readouterr().out.count('"event": "tokenized"') in (0, 1), "the other half"
    tokenization.tokenize_shard(run.uri, 2, 2)
    assert capsys.readouterr().out == "", "the tokens are committed: nothing is fetched"


@pytest.mark.slow
def test_a_killed_shard_is_made_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    run, whole = prepared(tmp_path / "killed"), prepared(tmp_path / "whole")
    tokenize(run, kill_after=3, code=SHARD)
    again = tokenize(run, code=SHARD)
    (resumed,) = [event for event in again if event["event"] == "resumed"]
    assert 3 <= resumed["parts"] < resumed["of"]
    assert sum(event["event"] == "tokenized" for event in again) == resumed["of"] - resumed["parts"]
    monkeypatch.setattr(tokenization, "LEAST", 600)
    tokenization.tokenize_shard(run.uri, 1, 2)
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    tokenization.tokenize_run(run.uri)
    assert '"event": "tokenized"' not in capsys.readouterr().out
    tokenization.tokenize_run(whole.uri)
    assert contents(run) == contents(whole)
