"""The split: each row on one side for good, none lost, what is broken kept."""

import html
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import events
from baton.checkpoint import seals
from baton.data import split as card
from baton.errors import FormatError, OtherRunError, UserError
from baton.runs import objects
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.data.splitting import BAD, GOOD, ROWS, rejected, sides, split, write

BROKEN = [b'{"text": ', b'{"text": "\xff"}', {"body": "x"}]


def test_broken_rows_below_the_limit(store: str, tmp_path: Path):
    source = write(tmp_path / "rows.jsonl", [*ROWS[:150], *BROKEN, *ROWS[150:]])

    found = split(store, source, max_rejected=0.01)

    assert {key: found[key] for key in ("format", "rows", "rejected")} == {"format": "text", "rows": 300, "rejected": 3}
    assert found["train"] + found["eval"] == 300
    assert [(row["line"], row["reason"], row["raw"]) for row in rejected(store)] == [
        (151, "broken JSON: Expecting value: line 1 column 10 (char 9)", '{"text": '),
        (152, "not UTF-8 at byte 10", '{"text": "\\xff"}'),
        (153, "column 'text' is missing", '{"body": "x"}'),
    ]
    assert {row["file"] for row in rejected(store)} == {source}
    assert found["rejected_uri"] == f"{store}/runs/run-1/rejected.jsonl"


def test_broken_rows_above_the_limit(store: str, tmp_path: Path):
    source = write(tmp_path / "rows.jsonl", [*BROKEN, *ROWS])

    with pytest.raises(UserError) as caught:
        split(store, source, max_rejected=0.009)

    assert str(caught.value) == (
        "3 of 303 rows are unusable, above data.max_rejected 0.009; the first is rows.jsonl line 1: "
        "broken JSON: Expecting value: line 1 column 10 (char 9). "
        f"They are kept with their reasons in {store}/runs/run-1/rejected.jsonl. "
        "Fix the data or raise data.max_rejected."
    )
    assert [row["line"] for row in rejected(store)] == [1, 2, 3]
    assert not Storage(store).exists("runs/run-1/data.json")


def test_a_file_that_begins_with_broken_rows(tmp_path: Path):
    rows = [{"prompt": f"p{number}", "completion": "c"} for number in range(200)]
    source = write(tmp_path / "rows.jsonl", [*([b"{"] * 25), *rows])

    found = split(str(tmp_path / "store"), source, max_rejected=0.2)

    assert (found["format"], found["rows"], found["rejected"]) == ("prompt-completion", 200, 25)


def test_rows_nested_as_deep_as_the_parser_goes(tmp_path: Path):
    deep = [b'{"text": ' + b"[" * depth + b"]" * depth + b"}" for depth in range(880, 1010)]
    source = write(tmp_path / "rows.jsonl", [*deep, *ROWS])

    found = split(str(tmp_path / "store"), source, max_rejected=0.5)

    assert (found["rows"], found["rejected"]) == (300, 130)
    assert len(rejected(str(tmp_path / "store"))) == 130


USER, ANSWER, OTHER = (
    {"role": role, "content": content} for role, content in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
)
TEXTS = {"prompt": "p", "chosen": "x", "rejected": "y"}
UNLIKE = {
    "a conversation among texts": (
        "dpo",
        TEXTS,
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        "chosen is a conversation, in the rows before it is not",
    ),
    "a text among conversations": (
        "dpo",
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        TEXTS,
        "prompt is a text, in the rows before it is not",
    ),
    "an answer missing": (
        "grpo",
        {"prompt": "p", "answer": "x"},
        {"prompt": "p"},
        "answer is missing, the rows before have it",
    ),
    "an answer too many": (
        "grpo",
        {"prompt": "p"},
        {"prompt": "p", "answer": "x"},
        "answer is given, the rows before have none",
    ),
}


@pytest.mark.parametrize(("method", "first", "unlike", "reason"), UNLIKE.values(), ids=UNLIKE)
def test_a_row_unlike_those_before_is_rejected(
    method: str, first: dict[str, Any], unlike: dict[str, Any], reason: str, tmp_path: Path
):
    def numbered(row: dict[str, Any], number: int) -> dict[str, Any]:
        tag = f" {number}"
        messages = isinstance(row["prompt"], list)
        prompt = [{**USER, "content": f"a{tag}"}] if messages else row["prompt"] + tag
        return {**row, "prompt": prompt}

    rows = [numbered(first, number) for number in range(60)]
    source = write(tmp_path / "rows.jsonl", [*rows, unlike, numbered(first, 60)])
    store = str(tmp_path / "store")

    found = split(store, source, method=method, max_rejected=0.1)

    assert (found["rows"], found["rejected"]) == (61, 1)
    assert [(row["line"], row["reason"]) for row in rejected(store)] == [(61, reason)]


MISPLACED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such side": ({"side": "late"}, {"column": "side"}, "column 'side' is 'late', expected train, eval or test"),
    "no side": ({}, {"column": "side"}, "column 'side' is missing (data.split.column)"),
    "no group": ({}, {"group_by": "author"}, "column 'author' is missing (data.split.group_by)"),
    "a lone surrogate": ({"author": "\ud800"}, {"group_by": "author"}, "column 'author' holds a lone surrogate"),
}


@pytest.mark.parametrize(("side", "rule", "reason"), MISPLACED.values(), ids=MISPLACED)
def test_a_row_that_is_rejected_does_not_decide_the_shape_of_the_others(
    side: dict[str, Any], rule: dict[str, Any], reason: str, tmp_path: Path
):
    """The first row is a conversation, and has no place; the others are texts."""
    first = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER], **side}
    rows = [{**TEXTS, "prompt": f"p{n}", "author": f"{n}", "side": ("train", "eval")[n % 2]} for n in range(40)]
    source = write(tmp_path / "rows.jsonl", [first, *rows])
    store = str(tmp_path / "store")

    found = split(store, source, method="dpo", max_rejected=0.1, split=rule)

    assert (found["rows"], found["rejected"]) == (40, 1)
    assert [(row["line"], row["reason"]) for row in rejected(store)] == [(1, reason)]


EMPTY = {
    "no byte": (b"", "holds no rows."),
    "blank lines": (b"\n \n", "holds no rows."),
    "nothing usable": (b"[]\n{}\n", "2 of 2 rows are unusable"),
}


@pytest.mark.parametrize(("content", "message"), EMPTY.values(), ids=EMPTY)
def test_no_rows(content: bytes, message: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(content)

    with pytest.raises(UserError) as caught:
        split(str(tmp_path / "store"), str(tmp_path / "rows.jsonl"))

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("max_rejected", "begins"),
    [
        pytest.param(0.5, "10 of 10 rows are unusable, above data.max_rejected 0.5; ", id="not-allowed"),
        pytest.param(1, "none of 10 rows is usable; ", id="allowed"),
    ],
)
def test_where_all_rows_are_refused_the_reasons_are_counted(max_rejected: float, begins: str, tmp_path: Path):
    bodies = [{"body": "x" * 100}, {"body": "y"}, {"body": "z"}]
    numbers = [{"text": 3}, {"text": 4}]
    odd = [b'{"text": "\xff"}', b'{"text": "\xff"}', b'{"text": "\xff"}', b'{"text": "\xff"}']
    source = write(tmp_path / "rows.jsonl", [*odd, *bodies, b'{"text": ', *numbers])

    with pytest.raises(UserError) as caught:
        split(str(tmp_path / "store"), source, max_rejected=max_rejected, format="text")

    message = str(caught.value)
    assert message.startswith(f"{begins}the reasons are:\n  4 × not UTF-8 at byte 10, such as rows.jsonl line 1: ")
    assert message.splitlines()[1:4] == [
        r"""  4 × not UTF-8 at byte 10, such as rows.jsonl line 1: '{"text": "\\xff"}'""",
        f"""  3 × column 'text' is missing, such as rows.jsonl line 5: '{{"body": "{"x" * 70}'""",
        """  2 × column 'text' is a int, expected text, such as rows.jsonl line 9: '{"text": 3}'""",
    ]
    assert "and 1 more reason(s). They are kept with their reasons in" in message
    assert message.endswith("Check data.format and data.columns against the rows.")


def test_one_row_cannot_be_on_both_sides(tmp_path: Path):
    with pytest.raises(UserError) as caught:
        split(str(tmp_path / "store"), write(tmp_path / "rows.jsonl", ROWS[:1]))

    assert "data.split.eval 0.1 leaves no eval rows of 1." in str(caught.value)


def test_max_samples(tmp_path: Path):
    store = str(tmp_path / "store")

    found = split(store, write(tmp_path / "rows.jsonl", ROWS), max_samples=100, split={"eval": 0.5})

    texts = {row["text"] for side in sides(store, found).values() for row in side}
    assert texts == {f"row {number}" for number in range(100)}


def test_the_same_data_elsewhere_is_the_same_split(store: str, tmp_path: Path):
    first = split(store, write(tmp_path / "a.jsonl", ROWS))
    second = split(store, write(tmp_path / "b.jsonl", ROWS), "run-2")
    other = split(store, write(tmp_path / "b.jsonl", ROWS), "run-3", split={"eval": 0.2})

    assert first["digest"] == second["digest"] != other["digest"]


def test_the_share_held_out(tmp_path: Path):
    rows = [{"text": f"row {number}"} for number in range(5000)]

    found = split(str(tmp_path / "store"), write(tmp_path / "rows.jsonl", rows), split={"eval": 0.1})

    assert 400 <= found["eval"] <= 600


@settings(max_examples=15)
@given(rows=st.lists(st.one_of(GOOD, BAD), max_size=30))
def test_no_row_is_lost_or_doubled(rows: list[Any]):
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder, "rows.jsonl"), [{"text": "anchor"}, *ROWS, *rows])
        found = split(f"{folder}/store", source, max_rejected=1)
        by_side = sides(f"{folder}/store", found)
        refused = rejected(f"{folder}/store") if found["rejected"] else []

    good = [row["text"] for row in rows if isinstance(row, dict)]
    came_out = [row["text"] for side in by_side.values() for row in side]
    assert Counter(came_out) == Counter(["anchor", *(row["text"] for row in ROWS), *good])
    assert [row["line"] for row in refused] == [
        number for number, row in enumerate(rows, 302) if isinstance(row, bytes)
    ]
    assert (found["train"], found["eval"]) == (len(by_side["train"]), len(by_side["eval"]))
    assert found["train"] + found["eval"] + found["rejected"] == 301 + len(rows)


@settings(max_examples=10)
@given(more=st.lists(GOOD, max_size=30), order=st.randoms(use_true_random=False), seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_growing_and_shuffling_move_no_row(more: list[dict[str, str]], order: random.Random, seed: int):
    shuffled = [*ROWS, *more]
    order.shuffle(shuffled)
    with tempfile.TemporaryDirectory() as folder:
        before = split(f"{folder}/a", write(Path(folder, "a.jsonl"), ROWS), seed=seed)
        after = split(f"{folder}/b", write(Path(folder, "b.jsonl"), shuffled), seed=seed)
        was, now = sides(f"{folder}/a", before), sides(f"{folder}/b", after)

    for side in ("train", "eval"):
        assert {row["text"] for row in was[side]} <= {row["text"] for row in now[side]}
    assert not {row["text"] for row in now["train"]} & {row["text"] for row in now["eval"]}


def test_another_seed_moves_rows(tmp_path: Path):
    source, store = write(tmp_path / "rows.jsonl", ROWS), str(tmp_path / "store")

    held_out = [
        {row["text"] for row in sides(store, split(store, source, f"run-{seed}", seed=seed))["eval"]} for seed in (1, 2)
    ]

    assert held_out[0] != held_out[1]


def test_a_run_of_before_keeps_its_rows(store: str, tmp_path: Path):
    source = write(tmp_path / "rows.jsonl", ROWS[:100])
    made = split(store, source)
    run = Run(Storage(store), "run-1")
    began = run.require("recipe.json")
    assert began["made"]["formats"]["rows"] == 2
    write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(OtherRunError):  # a run of now is held to its rows
        split(store, source)
    with seals.stage(run, objects.ADOPT):  # else the next stage writes it again from its seal
        run.put("recipe.json", {**began, "made": {"baton": "0.1.0", "formats": {"tokens": 1}}})
    kept = split(store, source)
    assert kept.keys() == made.keys()
    assert {**kept, "page": ""} == {**made, "page": ""}
    assert run.require("recipe.json")["made"]["formats"] == {"tokens": 1}
    started = Run(Storage(store), "run-2")
    started.put("recipe.json", {**began, "name": "run-2", "made": {"baton": "0.1.0", "formats": {}}})
    with pytest.raises(FormatError, match=r"its rows are not there, and this Baton, .*, makes other ones\. Start"):
        split(store, source, "run-2")


BECAME: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "own names": ({"prompt": "{n}?", "completion": "{n}"}, "sft", {}, "prompt-completion (prompt, completion)"),
    "common names, and the answer that is not taken": (
        {"problem": "{n}?", "solution": "It is {n}.", "answer": "{n}", "source": "amc"},
        "sft",
        {},
        "prompt-completion (prompt ← problem, completion ← solution; not used: answer, source)",
    ),
    "a further column, one that decides the side, and a part of one": (
        {"question": {"text": "{n}?"}, "answer": "{n}", "level": "1", "by": "{n}", "x": 1},
        "grpo",
        {"extra_columns": ["level"], "split": {"group_by": "by", "eval": 0.3}},
        "prompt (prompt ← question.text, answer; not used: x)",
    ),
    "a system message for turns": (
        {"prompt": "{n}?", "chosen": "a", "rejected": "b", "system": "s"},
        "dpo",
        {},
        "preference (chosen, rejected, prompt, system)",
    ),
    "a system message for text": (
        {"prompt": "{n}?", "chosen": "a", "rejected": "b", "system": "s"},
        "dpo",
        {"render_as": "text"},
        "preference (chosen, rejected, prompt; not used: system)",
    ),
    "plain text": ({"text": "{n}"}, "sft", {}, "text"),
    "plain text beside others": ({"text": "{n}", "url": "u"}, "sft", {}, "text (text; not used: url)"),
}


@pytest.mark.parametrize("name", BECAME)
def test_a_run_says_which_columns_became_what(name: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    row, method, settings_, words = BECAME[name]
    filled = [json.loads(json.dumps(row).replace("{n}", str(n))) for n in range(30)]
    source = write(tmp_path / "rows.jsonl", filled)
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    found = split(str(tmp_path / "store"), source, method=method, **{"split": {"eval": 0.3}, **settings_})
    told = [
        each for line in capsys.readouterr().out.splitlines() if isinstance(each := events.parse(line), events.Source)
    ]
    assert [each.in_words for each in told] == [f"rows of {words}"]
    run = Run(Storage(str(tmp_path / "store")), "run-1")
    line = f"{source} holds rows of {words}"
    assert run.require("quality.json")["sources"] == [line]
    assert line in html.unescape(found["page"])
    assert line in card.rows_card(run, found, "run-1").text
