"""The rules of the split in whole runs: several sources, given sides, strata, groups, samples, and what is kept."""

import gzip
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import UserError
from baton.store.storage import Storage
from tests.data.splitting import BAD, GOOD, ROWS, rejected, sides, split, texts, write


def test_three_sides(tmp_path: Path):
    store = str(tmp_path / "store")

    found = split(store, write(tmp_path / "rows.jsonl", ROWS), split={"eval": 30, "test": 60})

    by_side = sides(store, found)
    assert {side: found[side] for side in by_side} == {"train": 210, "eval": 30, "test": 60}
    assert {side: len(rows) for side, rows in by_side.items()} == {"train": 210, "eval": 30, "test": 60}
    assert sum((texts(rows) for rows in by_side.values()), Counter()) == texts(ROWS)
    assert found["pinned"].startswith(f"{store}/splits/tiny-")


def test_several_sources(store: str, tmp_path: Path):
    """Each with its own type, columns and weight; held-out rows are there once."""
    (tmp_path / "b.csv").write_text("title;body\n" + "".join(f"b;{number}\n" for number in range(100)))
    pairs = [{"q": f"c {number}", "a": "x"} for number in range(100)]
    given_side = [{"text": f"d {number}", "extra": 1} for number in range(5)]
    found = split(
        store,
        [
            write(tmp_path / "a.jsonl", [{"text": f"a {number}"} for number in range(100)]),
            {"uri": str(tmp_path / "b.csv"), "weight": 2.5, "columns": {"text": ["title", "body"]}},
            {
                "uri": write(tmp_path / "c.json", [{"q": "c", "a": "y"}, *pairs]),
                "weight": 0.5,
                "columns": {"text": "q"},
            },
            {"uri": write(tmp_path / "d.jsonl", given_side), "side": "test"},
        ],
        join=" ",
        split={"eval": 0.2},
    )

    by_side = {side: texts(rows) for side, rows in sides(store, found).items()}
    assert by_side["test"] == {f"d {number}": 1 for number in range(5)}
    assert set(by_side["eval"].values()) == {1}
    assert {text[0] for text in by_side["eval"]} == {"a", "b", "c"}
    assert {times for text, times in by_side["train"].items() if text[0] == "a"} == {1}
    assert {times for text, times in by_side["train"].items() if text[0] == "b"} == {2, 3}
    assert {times for text, times in by_side["train"].items() if text[0] == "c"} == {1}
    assert 20 < sum(text[0] == "c" for text in by_side["train"]) < 60
    assert found["rows"] == 306
    assert [(part["files"], part["format"], part["rows"]) for part in found["sources"]] == [
        ({"jsonl": 1}, "text", 100),
        ({"csv": 1}, "text", 100),
        ({"jsonl": 1}, "text", 101),
        ({"jsonl": 1}, "text", 5),
    ]


LABELLED = [
    {"text": f"row {number}", "lang": "de" if number % 10 else "fr", "author": f"a{number % 20}", "part": part}
    for number, part in enumerate(["train"] * 150 + ["dev"] * 30 + ["test"] * 20)
]


def test_a_given_split(tmp_path: Path):
    store = str(tmp_path / "store")

    found = split(store, write(tmp_path / "rows.jsonl", LABELLED), split={"column": "part", "eval": 500})

    assert {side: found[side] for side in ("train", "eval", "test")} == {"train": 150, "eval": 30, "test": 20}
    assert sides(store, found)["test"] == [{"text": f"row {number}"} for number in range(180, 200)]


def test_strata(tmp_path: Path):
    store = str(tmp_path / "store")

    found = split(store, write(tmp_path / "rows.jsonl", LABELLED), split={"stratify_by": "lang", "eval": 0.25})

    held_out = sides(store, found)["eval"]
    assert {tuple(row) for row in held_out} == {("text",)}
    languages = Counter(LABELLED[int(row["text"].split()[1])]["lang"] for row in held_out)
    assert languages == {"de": 45, "fr": 5}


def test_groups(tmp_path: Path):
    store = str(tmp_path / "store")

    found = split(store, write(tmp_path / "rows.jsonl", LABELLED), split={"group_by": "author", "eval": 0.3})

    authors = {
        side: {LABELLED[int(row["text"].split()[1])]["author"] for row in rows}
        for side, rows in sides(store, found).items()
    }
    assert authors["train"] | authors["eval"] == {f"a{number}" for number in range(20)}
    assert not authors["train"] & authors["eval"]


MISSING = {
    "group_by": ({"lang": None}, "column 'lang' is missing (data.split.group_by)"),
    "stratify_by": ({"lang": None}, "column 'lang' is missing (data.split.stratify_by)"),
    "column": ({"lang": "fr"}, "column 'lang' is 'fr', expected train, eval or test"),
}


@pytest.mark.parametrize(("setting", "case"), MISSING.items(), ids=MISSING)
def test_a_row_without_what_decides_its_side(setting: str, case: tuple[dict[str, Any], str], tmp_path: Path):
    unlike, reason = case
    rows = [{**row, "lang": "val" if number % 5 == 0 else "training"} for number, row in enumerate(ROWS)]
    source = write(tmp_path / "rows.jsonl", [*rows, {"text": "odd", **unlike}])

    found = split(str(tmp_path / "store"), source, split={setting: "lang", "eval": 0.5}, seed=6)

    assert (found["rows"], found["rejected"]) == (300, 1)
    assert [(row["line"], row["reason"]) for row in rejected(str(tmp_path / "store"))] == [(301, reason)]


@pytest.mark.parametrize("value", ["\ud800", ["\ud800"]], ids=["text", "list"])
def test_a_group_that_cannot_be_written(value: Any, tmp_path: Path):
    rows = [{**row, "author": number} for number, row in enumerate(ROWS)]
    source = write(tmp_path / "rows.jsonl", [*rows, {"text": "odd", "author": value}])

    found = split(str(tmp_path / "store"), source, split={"group_by": "author"})

    assert (found["rows"], found["rejected"]) == (300, 1)
    assert [row["reason"] for row in rejected(str(tmp_path / "store"))] == ["column 'author' holds a lone surrogate"]


def test_a_file_whose_name_is_not_utf8(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Linux allows any bytes; the page writes those that are no characters."""
    caplog.set_level("CRITICAL", logger="baton")  # what pytest's processes tell each other has no such names
    write(tmp_path / "rows-\udcff.jsonl", [*ROWS, {"text": "\ud800"}])

    found = split(str(tmp_path / "store"), str(tmp_path / "*.jsonl"))

    assert (found["rows"], found["rejected"]) == (300, 1)
    assert [row["file"][-12:] for row in rejected(str(tmp_path / "store"))] == ["rows-\udcff.jsonl"]
    page = Storage(str(tmp_path / "store")).read("runs/run-1/data-quality.html")
    assert page.count(rb"rows-\udcff.jsonl</") == 1


@pytest.mark.parametrize("setting", ["group_by", "stratify_by", "column"])
def test_a_column_that_is_not_there(setting: str, tmp_path: Path):
    source = write(tmp_path / "rows.jsonl", ROWS)

    with pytest.raises(UserError) as caught:
        split(str(tmp_path / "store"), source, split={setting: "langs"})

    assert str(caught.value) == (
        f"data.split.{setting}: 'langs' is not a column of {source}; its first rows have text. "
        f"Change data.split.{setting}."
    )


def test_sources_that_do_not_go_together(tmp_path: Path):
    text = write(tmp_path / "a.jsonl", ROWS)
    pairs = write(tmp_path / "b.jsonl", [{"prompt": "p", "completion": "c"}])

    with pytest.raises(UserError) as caught:
        split(str(tmp_path / "store"), [text, pairs])

    assert f"{text} is text and {pairs} is prompt-completion, which are not trained on together." in str(caught.value)


def test_samples_of_the_whole(tmp_path: Path):
    store = str(tmp_path / "store")

    found = split(store, write(tmp_path / "a.jsonl", ROWS), max_samples=100, shuffle=True, split={"eval": 0.5})
    other = split(store, write(tmp_path / "b.jsonl", ROWS[::-1]), "run-2", max_samples=100, shuffle=True)

    chosen = sum((texts(rows) for rows in sides(store, found).values()), Counter())
    assert chosen == sum((texts(rows) for rows in sides(store, other).values()), Counter())
    assert (found["rows"], len(chosen)) == (100, 100)
    assert len({text for text in chosen if int(text.split()[1]) >= 150}) > 25


def test_a_file_that_breaks_off(tmp_path: Path):
    content = gzip.compress(Path(write(tmp_path / "rows.jsonl", ROWS)).read_bytes())
    source, store = tmp_path / "rows.jsonl.gz", str(tmp_path / "store")
    source.write_bytes(content[:-9])

    with pytest.raises(UserError) as caught:
        split(store, str(source), max_rejected=0.99)

    assert str(caught.value) == (
        f"data.source: {source} cannot be read from line 301 on, and how many rows that loses is unknown: "
        "cannot be decompressed: Compressed file ended before the end-of-stream marker was reached. "
        "Write the file again, or set data.max_rejected to 1 to continue with what can be read."
    )
    found = split(store, str(source), "run-2", max_rejected=1)
    assert (found["rows"], found["rejected"]) == (300, 1)
    assert [row["rest"] for row in rejected(store, "run-2")] == [True]


def test_too_many_broken_rows_pin_nothing(tmp_path: Path):
    with pytest.raises(UserError, match="50 of 350 rows are unusable"):
        split(str(tmp_path / "store"), write(tmp_path / "a.jsonl", [*ROWS, *[b"{"] * 50]), split={"eval": 50})

    assert Storage(str(tmp_path / "store")).list("splits") == []


SAME = {
    "a fitting format": {"format": "text"},
    "another limit": {"max_rejected": 0.5},
    "a column that is called so": {"columns": {"text": "text"}},
    "a sample of all": {"max_samples": 300},
    "what tokenizing looks at": {"max_length": 64, "packing": True, "separator": " "},
}


@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_the_digest_is_of_what_is_written(settings: dict[str, Any], tmp_path: Path):
    source, store = write(tmp_path / "rows.jsonl", ROWS), str(tmp_path / "store")

    assert split(store, source)["digest"] == split(store, source, "run-2", **settings)["digest"]


OTHER = {
    "another share": {"split": {"eval": 0.2}},
    "a test side": {"split": {"test": 0.1}},
    "a weight": {"source_settings": {"weight": 2}},
    "fewer": {"max_samples": 299},
    "another seed": {"seed": 8},
}


@pytest.mark.parametrize("settings", OTHER.values(), ids=OTHER)
def test_the_digest_knows(settings: dict[str, Any], tmp_path: Path):
    uri, store = write(tmp_path / "rows.jsonl", ROWS), str(tmp_path / "store")
    source = {"uri": uri, **settings.get("source_settings", {})}
    rest = {name: value for name, value in settings.items() if name != "source_settings"}

    assert split(store, uri)["digest"] != split(store, source, "run-2", **rest)["digest"]


@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(st.one_of(GOOD, BAD), st.sampled_from(["x", "y", None])), max_size=30),
    own=st.fixed_dictionaries(
        {"eval": st.sampled_from([0.3, 20])},
        optional={"stratify_by": st.just("k"), "test": st.sampled_from([0.2, 10])},
    ),
    weight=st.sampled_from([1, 0.5, 2.25]),
)
def test_no_row_is_lost_or_doubled_whatever_the_rule(rows: list[Any], own: dict[str, Any], weight: float):
    given_rows = [{**row, "k": key} if isinstance(row, dict) else row for row, key in rows]
    with tempfile.TemporaryDirectory() as folder:
        uri = write(Path(folder, "rows.jsonl"), [*({**row, "k": "x"} for row in ROWS), *given_rows])
        found = split(f"{folder}/store", {"uri": uri, "weight": weight}, max_rejected=1, split=own)
        by_side = sides(f"{folder}/store", found)
        refused = rejected(f"{folder}/store") if found["rejected"] else []

    usable = [row for row in given_rows if isinstance(row, dict) and (row["k"] or "stratify_by" not in own)]
    expected = texts([*ROWS, *usable])
    held_out = texts(by_side["eval"]) + texts(by_side["test"])
    used = texts(by_side["train"])
    assert found["rows"] + len(refused) == 300 + len(rows)
    assert found["rows"] == expected.total()
    assert not held_out.keys() & used.keys()
    assert all(expected[text] == times for text, times in held_out.items())
    assert all(abs(times / expected[text] - weight) < 1 for text, times in used.items())
    if weight >= 1:
        assert held_out.keys() | used.keys() == expected.keys()
