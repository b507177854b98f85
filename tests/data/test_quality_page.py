"""The page about the rows: what it says, that it needs nothing, and that it escapes what it is given."""

from typing import Any

import pytest

from baton.pages import quality_page
from baton.pages.quality_page import length_bars, render
from baton.recipe import load
from baton.runs.run import Run
from baton.store.storage import Storage
from tests.support.pages import read

HOSTILE = "<script>alert(1)</script><img src='https://evil.test/x'>"


def entry(rows: int, of: int = 200, **more: Any) -> dict[str, Any]:
    """What the split counts for a check."""
    return {"rows": rows, "of": of, "share": rows / of, "mended": 0, "dropped": 0, "examples": [], **more}


EXAMPLE = {"file": "s3://bucket/rows.jsonl", "line": 1234, "reason": HOSTILE, "outcome": "kept", "text": HOSTILE}
CHECKS = {
    "rejected": entry(1, examples=[EXAMPLE]),
    "few_rows": entry(180, 100),
    "secrets": entry(2, examples=[EXAMPLE]),
    "encoding": entry(3, mended=3, examples=[EXAMPLE]),
    "duplicates": entry(0),
    "emails": entry(0),
    "language": entry(0),
}
LENGTHS = {
    "rows": 200,
    "mean": 70.5,
    "longest": 130,
    "over": 30,
    "histogram": [[64, 120], [96, 50], [128, 20], [192, 10]],
}


def collected(
    folder: Any, quality: dict[str, Any], lengths: dict[str, Any] | None = LENGTHS, **data: Any
) -> dict[str, Any]:
    """What is known of a run with these checks."""
    run = Run(Storage(str(folder)), "run-1")
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {"source": f"rows{HOSTILE}.jsonl", "max_length": 80, "quality": quality, **data},
    }
    run.create(load.validate(document, origin="r.yaml"))
    rows = {"looked_at": 200, "train": 180, "eval": 15, "test": 5, "rejected": 1, "dropped": 0, "mended": 3}
    languages = {"expected": [], "rows": 200, "shares": [["en", 0.9], ["de", 0.06], ["und", 0.04]]}
    columns = {HOSTILE: {"rows": 200, "empty_share": 0.005, "mean_characters": 91.4, "longest": 1200}}
    document = {"checks": CHECKS, "rows": rows, "languages": languages, "columns": columns}
    run.put("quality.json", {**document, "findings_uri": "s3://bucket/quality.jsonl", "rejected_uri": "s3://bucket/no"})
    if lengths:
        run.put("tokens.json", {"lengths": lengths})
    return quality_page.collect(run)


def test_the_page_says_what_was_found(tmp_path: Any):
    found = collected(tmp_path, {"secrets": "fail", "encoding": "fix", "emails": "off", "truncated_share": 0.1})
    page = read(render(found))

    assert [(check["name"], check["verdict"]) for check in found["checks"]] == [
        ("secrets", "failed"), ("rejected", "warn"), ("truncation", "warn"), ("encoding", "fixed"), ("few_rows", "ok"),
        ("duplicates", "ok"), ("language", "ok"), ("emails", "off"),
    ]  # fmt: skip
    for words in (
        "Do not train on this yet. The recipe forbids these findings: secrets.",
        "✗ Secrets 2 rows (1.0%) not allowed",
        "! Length 30 rows (15.0%) longer than 80 tokens look at it",
        "✓ Encoding 3 rows (1.5%): 3 mended dealt with",
        "✓ Enough rows 180 rows to train on fine",
        "– E-mail addresses not checked off",
        "The recipe sets secrets: fail.",
        "rows.jsonl line 1,234",
        "The first 1 of 2; all are in s3://bucket/quality.jsonl.",
        "30 rows (15.0%) are longer than max_length, 80 tokens.",
        "en 90.0% de 6.0% unclear 4.0%",
        "to train on 180 90.0% evaluation 15 7.5% test 5 2.5%",
    ):
        assert words in page.text
    assert [mark["text"] for mark in page.plot("rows")["marks"]] == ["max_length 80"]


def test_the_page_loads_and_runs_nothing(tmp_path: Any):
    html = render(collected(tmp_path, {}))
    page = read(html)

    assert HOSTILE not in html
    assert page.text.count("alert(1)") >= 4  # the source, the field, reasons and texts
    assert "default-src 'none'" in html


@pytest.mark.parametrize(
    ("quality", "data", "state", "sentence"),
    [
        ({"secrets": "fail", "truncation": "fail"}, {}, "failed",
         "Do not train on this yet. The recipe forbids these findings: length and secrets."),
        ({"encoding": "fail"}, {"max_rejected": 0.001}, "failed",
         "Do not train on this yet. The recipe forbids these findings: unusable rows and encoding."),
        ({"encoding": "fix"}, {}, "warn", "Check unusable rows, length and secrets before you pay for a GPU."),
    ],
)  # fmt: skip
def test_the_verdict(quality: dict[str, Any], data: dict[str, Any], state: str, sentence: str, tmp_path: Any):
    found = collected(tmp_path, quality, **data)
    assert (found["state"], found["sentence"]) == (state, sentence)


def test_good_news():
    names = [("fixed", "Encoding"), ("fixed", "Duplicates"), ("ok", "Turns")]
    checks = [{"verdict": verdict, "title": title} for verdict, title in names]
    assert quality_page.sentence(checks) == "These rows are ready: encoding and duplicates were dealt with."
    assert quality_page.sentence(checks[2:]) == "These rows are ready: no check found anything."


@pytest.mark.parametrize(
    ("action", "over", "share", "packing", "verdict", "dropped"),
    [
        ("warn", 10, 0.05, False, "ok", 0),
        ("warn", 11, 0.05, False, "warn", 0),
        ("fail", 11, 0.05, False, "failed", 0),
        ("fail", 11, 0.06, False, "ok", 0),
        ("fix", 1, 0.05, False, "fixed", 1),
        ("fix", 0, 0.05, False, "ok", 0),
        ("off", 11, 0.05, False, "off", 0),
        ("fail", 200, 0.05, True, "ok", 0),
    ],
)
def test_truncation(action: str, over: int, share: float, packing: bool, verdict: str, dropped: int, tmp_path: Any):
    quality = {"truncation": action, "truncated_share": share}
    found = collected(tmp_path, quality, {**LENGTHS, "over": over}, packing=packing, format="text")
    check = next(check for check in found["checks"] if check["name"] == "truncation")
    assert (check["verdict"], check["dropped"]) == (verdict, dropped)


def test_before_the_rows_are_tokenized(tmp_path: Any):
    text = read(render(collected(tmp_path, {}, None))).text
    assert "Known once the rows are tokenized." in text
    assert "Length of the rows" in text


def test_a_run_that_was_not_checked(tmp_path: Any):
    """As one that a version without checks has split."""
    run = Run(Storage(str(tmp_path)), "run-1")
    run.create(load.validate({"name": "t", "model": {"base": "o/m"}, "data": {"source": "r"}}, origin="r.yaml"))
    assert "The rows were not checked." in read(render(quality_page.collect(run))).text


def test_the_bar_of_max_length_is_cut():
    """Of the 50 rows in (64, 96], 20 are longer than 80: 30 over in all, less the 10 above 96."""
    lengths = {"over": 30, "histogram": [[64, 120], [96, 50], [192, 10]]}
    assert length_bars(lengths, 80) == [(48, 64, 120), (64, 80, 30), (80, 96, 20), (128, 192, 10)]
    assert length_bars(lengths, 96) == [(48, 64, 120), (64, 96, 50), (128, 192, 10)]


@pytest.mark.parametrize(
    ("share", "told"), [(None, "—"), (0, "0%"), (0.00001, "< 0.01%"), (0.0042, "0.42%"), (0.5, "50.0%"), (1, "100.0%")]
)
def test_percent(share: float | None, told: str):
    assert quality_page.percent(share) == told
