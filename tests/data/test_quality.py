"""Each check finds what it is for, and does with it what the recipe says."""

import json
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.data.quality import Inspection, require_verdicts
from baton.data.rows import SIDES, Record, Spool, as_content
from baton.errors import UserError
from baton.recipe import load

Row = dict[str, Any]
ACTIONS = ("off", "warn", "fix", "fail")


def recipe(method: str = "sft", **quality: Any) -> Any:
    """A recipe in which all checks are off but those that are given."""
    names = ("empty", "duplicates", "near_duplicates", "leakage", "encoding", "control_characters", "turns",
             "language", "secrets", "emails", "few_rows", "same_answers", "truncation")  # fmt: skip
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {"source": "rows.jsonl", "quality": {**dict.fromkeys(names, "off"), **quality}},
        "training": {"method": method},
    }
    return load.validate(document, origin="r.yaml")


class Result:
    """What came out of an inspection: rows by side, the summary, and the lines that were kept."""

    def __init__(self, rows: dict[str, list[Row]], summary: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.summary = summary
        self.lines = lines

    def check(self, name: str) -> tuple[str, int, int, int]:
        """Verdict, rows found, mended and dropped."""
        found = self.summary["checks"][name]
        return found["verdict"], found["rows"], found["mended"], found["dropped"]


def inspect(rows: list[Row], folder: Path, given: Any) -> Result:
    """Take rows through an inspection as the split does; the column `side` says where a row lies."""
    folder.mkdir(exist_ok=True)
    inspection = Inspection(given, str(folder))
    looked = []
    for line, row in enumerate(rows, 1):
        content = as_content({name: value for name, value in row.items() if name != "side"})
        record = inspection.look(Record(content, "rows.jsonl", line))
        if record is not None:
            looked.append(replace(record, side=row.get("side", "train")))
            inspection.remember(record)
    left: dict[str, list[Row]] = {"train": [], "eval": [], "test": []}
    sides = np.array([SIDES.index(record.side) for record in looked], dtype=np.uint8)
    for record in compress(looked, inspection.resolve(Spool(looked, f"{folder}/rows.jsonl"), sides)):
        left[record.side].append(record.row)
    summary = inspection.summary({**{name: len(left[name]) for name in left}, "rejected": 0}, [], len(rows))
    lines = [json.loads(line) for line in Path(inspection.findings.path).read_text("utf-8").splitlines()]
    assert len(lines) == inspection.findings.lines
    return Result(left, summary, lines)


def turn(role: str, content: str) -> dict[str, str]:
    """A turn of a conversation."""
    return {"role": role, "content": content}


def calling(**arguments: str) -> Row:
    """A turn that says nothing and calls a tool."""
    function = {"name": "send", "arguments": arguments}
    return {**turn("assistant", ""), "tool_calls": [{"type": "function", "id": "call_1", "function": function}]}


SEND = {"type": "function", "function": {"name": "send", "description": "Sends it.", "parameters": {}}}

LONG = "A farmer sells forty two apples on Monday and half as many on Tuesday, how many does he sell in the two days"
NEAR = LONG.replace("forty two", "forty three")
KEY = "AKIAQ3EGRIPRNLTLY5ZW"
GERMAN = "Der Bauer verkauft am Montag zweiundvierzig Äpfel und am Dienstag halb so viele, wie viele sind es zusammen?"

CASES: list[tuple[str, Row, str, Row | None, dict[str, Any]]] = [
    ("empty", {"prompt": "Why?", "completion": "ok"}, "completion has fewer than 3 visible characters", None, {}),
    ("empty", {"text": "a\u200b\n\t b"}, "text has fewer than 3 visible characters", None, {}),
    ("empty", {"text": "four"}, "text has fewer than 5 visible characters", None, {"near_empty_characters": 5}),
    ("empty", {"messages": [turn("user", "Say it"), turn("assistant", "o")]},
     "messages has fewer than 3 visible characters", None, {}),
    ("empty", {"messages": [turn("user", " "), turn("assistant", "Good day")]},
     "turn 1 of messages has no text", None, {}),
    ("encoding", {"text": "the cafÃ© is open"}, "decoded with the wrong table: 'é is open' is meant",
     {"text": "the café is open"}, {}),
    ("encoding", {"messages": [turn("user", "itâ€™s me"), turn("assistant", "Good day")]},
     "decoded with the wrong table: '’s me' is meant",
     {"messages": [turn("user", "it’s me"), turn("assistant", "Good day")]}, {}),
    ("control_characters", {"text": "one\x00two\tthree\r\nfour"}, "control character U+0000",
     {"text": "onetwo\tthree\r\nfour"}, {}),
    ("control_characters", {"prompt": "what", "completion": "\x1b\x1b"}, "control character U+001B", None, {}),
    ("turns", {"messages": [turn("user", "one"), turn("user", "two"), turn("assistant", "three")]},
     "turn 2 is the user's, as the previous one", None, {}),
    ("turns", {"messages": [turn("user", "one"), turn("gpt", "two")]}, "turn 2 has the unknown role 'gpt'", None, {}),
    ("turns", {"messages": [turn("system", "be kind"), turn("assistant", "Good day")]},
     "turn 2 is the assistant's, before the user's first", None, {}),
    ("turns", {"messages": [turn("user", "one"), turn("assistant", "two"), turn("user", "three")]},
     "the last turn is the user's and has no answer", None, {}),
    ("turns", {"prompt": [turn("user", "one")], "chosen": [turn("assistant", "two")], "rejected": [turn("user", "no")]},
     "turn 2 is the user's, as the previous one", None, {}),
    ("language", {"text": GERMAN}, "language de, expected en or fr", None, {"languages": ["en", "fr"]}),
    ("secrets", {"text": f"use {KEY} here"}, "AWS Access Key", {"text": "use [SECRET] here"}, {}),
    ("secrets", {"prompt": "log in", "completion": 'password = "Tr0ub4dor&3x"', "note": f"{KEY}."},
     "password, AWS Access Key", {"prompt": "log in", "completion": 'password = "[SECRET]"', "note": "[SECRET]."}, {}),
    ("secrets", {"text": "in a column of the user's", "role": KEY}, "AWS Access Key",
     {"text": "in a column of the user's", "role": "[SECRET]"}, {}),
    ("secrets", {"messages": [turn("user", "Send it"), calling(key=KEY)], "tools": [SEND]}, "AWS Access Key",
     {"messages": [turn("user", "Send it"), calling(key="[SECRET]")], "tools": [SEND]}, {}),
    ("encoding", {"messages": [turn("user", "Send it"), calling(to="cafÃ©")]},
     "decoded with the wrong table: 'é' is meant", {"messages": [turn("user", "Send it"), calling(to="café")]}, {}),
    ("emails", {"prompt": [turn("user", "Send it")], "chosen": [calling(to="jane.doe@acme-corp.io")],
                "rejected": [calling(to="me")]}, "e-mail address",
     {"prompt": [turn("user", "Send it")], "chosen": [calling(to="[EMAIL]")], "rejected": [calling(to="me")]}, {}),
    ("same_answers", {"prompt": [turn("user", "why")], "chosen": [calling(to="me")], "rejected": [
        {**calling(), "tool_calls": [{**calling(to="me")["tool_calls"][0], "id": "call_2"}]}]},
     "chosen and rejected are the same", None, {}),
    ("turns", {"messages": [turn("user", "one"), calling(to="me"), turn("tool", "two"), turn("user", "three")]},
     "the last turn is the user's and has no answer", None, {}),
    ("emails", {"text": "write to jane.doe@acme-corp.io."}, "e-mail address", {"text": "write to [EMAIL]."}, {}),
    ("same_answers", {"prompt": "why", "chosen": "so  it is", "rejected": "so it is\n"},
     "chosen and rejected are the same", None, {}),
    ("same_answers", {"prompt": [turn("user", "why")], "chosen": [turn("assistant", "so")],
     "rejected": [turn("assistant", "so")]}, "chosen and rejected are the same", None, {}),
]  # fmt: skip
"""Check, a row that it is for, what it says, the row as `fix` leaves it (None: dropped), and further settings."""

FINE: list[Row] = [
    {"text": "a plain text"},
    {"text": "café, 漢字, emoji 👩‍👩‍👧 and a tab\tand\r\nlines"},
    {"prompt": "2+2", "completion": "four", "label": True},
    {"messages": [turn("system", "be kind"), turn("user", "one"), turn("assistant", "two")]},
    {"messages": [turn("user", "one"), {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "x": "1"}]},
                  turn("tool", "two"), turn("assistant", "three")]},
    {"messages": [turn("user", "one"), calling(to="me"), turn("tool", "two"), turn("tool", "three"), calling(to="you"),
                  {**turn("tool", "four"), "tool_call_id": KEY}, turn("assistant", "five")], "tools": [SEND]},
    {"messages": [turn("user", "one"), {**turn("assistant", "so"), "reasoning_content": "Well.", "train": False}]},
    {"prompt": [turn("user", "one"), calling(to="me"), turn("tool", "two")], "completion": [calling(to="you")]},
    {"prompt": [turn("user", "Is it?")]},
    {"prompt": "why", "chosen": "so", "rejected": "not so"},
    {"text": "an example: AKIAIOSFODNN7EXAMPLE, ghp_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx, password = \"password123\""},
    {"text": "write to me@example.com, you@test.org, git@github.com or icon@2x.png"},
    {"text": "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {"text": "id 550e8400-e29b-41d4-a716-446655440000 and 123456789012345678901234567890"},
]  # fmt: skip
"""Rows in which no check of single rows finds anything, if short texts are allowed."""


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("check", "row", "reason", "fixed", "settings"), CASES, ids=[f"{case[0]}-{at}" for at, case in enumerate(CASES)]
)
def test_single_rows(
    check: str, row: Row, reason: str, fixed: Row | None, settings: dict[str, Any], action: str, tmp_path: Path
):
    fine = {"text": LONG}
    given = recipe(**{check: action}, **settings)

    found = inspect([fine, row], tmp_path, given)

    verdict = {"off": "off", "warn": "warn", "fix": "fixed", "fail": "failed"}[action]
    if action == "off":
        assert found.check(check) == (verdict, 0, 0, 0)
        assert (found.rows["train"], found.lines) == ([fine, row], [])
        return
    mended, dropped = int(action == "fix" and fixed is not None), int(action == "fix" and fixed is None)
    assert found.check(check) == (verdict, 1, mended, dropped)
    assert found.rows["train"] == ([fine, *([fixed] if fixed else [])] if action == "fix" else [fine, row])
    outcome = "mended" if mended else "dropped" if dropped else "kept"
    line = {key: value for key, value in found.lines[0].items() if key != "row"}
    assert line == {"check": check, "outcome": outcome, "file": "rows.jsonl", "line": 2, "reason": reason}
    assert ("row" in found.lines[0]) == (action == "fix")
    assert found.summary["checks"][check]["examples"][0]["line"] == 2
    if action == "fail":
        with pytest.raises(UserError) as error:
            require_verdicts(found.summary, "s3://store/quality.jsonl")
        assert str(error.value) == (
            f"data.quality.{check}: found in 1 of 2 rows; the first is rows.jsonl line 2: {reason}. "
            f"All are in s3://store/quality.jsonl. Fix the data, or set data.quality.{check} to warn or fix."
        )
    else:
        require_verdicts(found.summary, "")


@pytest.mark.parametrize("row", FINE, ids=[f"row-{at}" for at in range(len(FINE))])
def test_good_rows_pass(row: Row, tmp_path: Path):
    checks = dict.fromkeys(
        ("empty", "encoding", "control_characters", "turns", "secrets", "emails", "same_answers"), "fix"
    )

    found = inspect([row], tmp_path, recipe(**checks, near_empty_characters=2))

    assert found.rows["train"] == [row]
    assert found.lines == []


def test_the_unmendable_is_kept_and_said(tmp_path: Path):
    row = {"text": "a character was lost h\ufffdre"}

    found = inspect([row], tmp_path, recipe(encoding="fix"))

    assert found.check("encoding") == ("warn", 1, 0, 0)
    assert found.rows["train"] == [row]
    assert found.lines[0]["reason"] == "replacement characters (U+FFFD)"


EQUAL = {"text": "the same words in every row of this little set"}
SET_CASES = {
    "duplicates": ([EQUAL, {"text": LONG}, EQUAL, EQUAL], [3, 4], "the same as line 1 (train)"),
    "near_duplicates": ([{"text": LONG}, EQUAL, {"text": NEAR}], [3], "nearly the same as line 1 (train)"),
    "leakage": (
        [{"text": NEAR}, {"text": LONG, "side": "eval"}, EQUAL, {**EQUAL, "side": "test"}, {"text": GERMAN}],
        [1, 3],
        "like the held-out line 2 (eval)",
    ),
}
"""Rows, the lines of those that a check finds, and what it says of the first."""


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("check", SET_CASES)
def test_rows_together(check: str, action: str, tmp_path: Path):
    rows, lines, reason = SET_CASES[check]

    found = inspect(rows, tmp_path, recipe(**{check: action}, near_duplicate_threshold=0.7))

    if action == "off":
        assert (found.check(check), found.lines) == (("off", 0, 0, 0), [])
        return
    dropped = len(lines) if action == "fix" else 0
    assert found.check(check) == ({"fix": "fixed", "fail": "failed", "warn": "warn"}[action], len(lines), 0, dropped)
    assert [line["line"] for line in found.lines] == lines
    assert found.lines[0]["reason"] == reason
    assert {line["outcome"] for line in found.lines} == {"dropped" if dropped else "kept"}
    expected = [row for number, row in enumerate(rows, 1) if not (dropped and number in lines)]
    for side in ("train", "eval", "test"):
        assert found.rows[side] == [{"text": row["text"]} for row in expected if row.get("side", "train") == side]
    assert found.summary["rows"]["dropped"] == dropped
    if action == "fail":
        with pytest.raises(
            UserError, match=rf"data\.quality\.{check}: found in {len(lines)} of {len(rows)} rows; the first"
        ):
            require_verdicts(found.summary, "s3://store/quality.jsonl")


@pytest.mark.parametrize(
    ("given", "action", "verdict"),
    [
        ({"least_rows": 3}, "warn", "ok"),
        ({"least_rows": 4}, "warn", "warn"),
        ({"least_rows": 4}, "fix", "warn"),
        ({"least_rows": 4}, "fail", "failed"),
        ({"least_rows": 4}, "off", "off"),
        ({}, "warn", "warn"),
    ],
)
def test_few_rows(given: dict[str, Any], action: str, verdict: str, tmp_path: Path):
    rows = [{"text": f"row {number}"} for number in range(3)] + [{"text": "held out", "side": "eval"}]

    found = inspect(rows, tmp_path, recipe(few_rows=action, **given))

    assert found.check("few_rows") == (verdict, 3, 0, 0)
    assert found.summary["checks"]["few_rows"]["of"] == given.get("least_rows", 100)
    if verdict == "failed":
        with pytest.raises(
            UserError, match=r"^data\.quality\.few_rows: 3 training rows, at least 4 are expected\. Fix"
        ):
            require_verdicts(found.summary, "s3://store/quality.jsonl")


def test_an_adapter_needs_fewer_rows(tmp_path: Path):
    document = {**recipe(few_rows="warn").model_dump(mode="json"), "adapter": {"r": 8}}
    rows = [{"text": f"row {number}"} for number in range(50)]

    found = inspect(rows, tmp_path, load.validate(document, origin="r.yaml"))

    assert found.summary["checks"]["few_rows"]["of"] == 50
    assert found.check("few_rows")[0] == "ok"


def test_secrets_are_never_shown(tmp_path: Path):
    """Neither in lines nor in examples, whichever check shows the row, and with the check for secrets off."""
    row = {"prompt": f"log in with {KEY}", "completion": "jane.doe@acme-corp.io says ok\x00"}

    for number, checks in enumerate(
        ({"control_characters": "fix"}, {"duplicates": "fix"}, {"secrets": "warn", "emails": "fix"})
    ):
        found = inspect([row, row], tmp_path / str(number), recipe(**checks))
        shown = json.dumps([found.summary, found.lines])
        assert found.lines
        assert KEY not in shown
        assert "jane.doe" not in shown


def test_a_secret_at_the_edge_of_what_is_shown(tmp_path: Path):
    """An example is cut after 240 characters; a part of a secret is one that nothing recognises."""
    for at in range(200, 260, 3):
        texts = [{"text": f"\x00{'a ' * (at // 2)}{KEY} {'b ' * 100}"}, {"text": f"{'a ' * (at // 2)}cafÃ© {KEY}"}]
        found = inspect(texts, tmp_path, recipe(control_characters="warn", encoding="warn"))
        shown = json.dumps([found.summary, found.lines])
        assert len(found.lines) == 2
        assert KEY[:6] not in shown


def test_unusable_rows_are_shown_without_secrets(tmp_path: Path):
    row = {
        "file": "rows.jsonl",
        "line": 7,
        "reason": f"label is '{KEY}'",
        "raw": f'{{"label": "{KEY}"}}',
        "rest": False,
    }
    summary = Inspection(recipe(), str(tmp_path)).summary({"train": 0, "eval": 0, "test": 0, "rejected": 1}, [row], 4)

    check = summary["checks"]["rejected"]
    assert (check["rows"], check["of"], check["verdict"]) == (1, 4, "failed")
    assert check["examples"] == [
        {"file": "rows.jsonl", "line": 7, "reason": "label is '[SECRET]'", "outcome": "dropped",
         "text": '{"label": "[SECRET]"}'}
    ]  # fmt: skip


def test_one_row_and_several_checks(tmp_path: Path):
    row = {"text": f"cafÃ©\x00 {KEY}"}

    found = inspect([row], tmp_path, recipe(encoding="fix", control_characters="fix", secrets="fix", emails="fix"))

    assert found.rows["train"] == [{"text": "café [SECRET]"}]
    assert [(line["check"], line["outcome"]) for line in found.lines] == [
        ("encoding", "mended"),
        ("control_characters", "mended"),
        ("secrets", "mended"),
    ]
    assert found.summary["rows"]["mended"] == 1


def test_five_examples_and_every_line(tmp_path: Path):
    found = inspect(
        [{"text": f"{number}\x00 is long enough"} for number in range(9)], tmp_path, recipe(control_characters="warn")
    )

    check = found.summary["checks"]["control_characters"]
    assert [example["line"] for example in check["examples"]] == [1, 2, 3, 4, 5]
    assert [line["line"] for line in found.lines] == list(range(1, 10))
    assert (check["rows"], check["of"], check["share"]) == (9, 9, 1.0)


def test_the_language_mix_is_shown_without_expectation(tmp_path: Path):
    rows = [{"text": f"{LONG} {number}"} for number in range(3)] + [{"text": GERMAN}, {"text": "42"}]

    found = inspect(rows, tmp_path, recipe(language="fix"))

    assert found.summary["languages"] == {"expected": [], "rows": 5, "shares": [["en", 0.6], ["de", 0.2], ["und", 0.2]]}
    assert found.check("language") == ("ok", 0, 0, 0)


def test_columns(tmp_path: Path):
    found = inspect([{"prompt": "ab", "completion": "  "}, {"prompt": "abcd", "completion": "x"}], tmp_path, recipe())

    assert found.summary["columns"] == {
        "prompt": {"rows": 2, "empty_share": 0.0, "mean_characters": 3.0, "longest": 4},
        "completion": {"rows": 2, "empty_share": 0.5, "mean_characters": 1.5, "longest": 2},
    }
