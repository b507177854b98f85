"""Tables as spreadsheets and databases write them: the same rows each time, or one sentence that says what to do."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from baton.data import readers
from baton.data.rows import SourceRow, UnusableRow
from baton.recipe.data import Csv, Data
from baton.runs.run import Sweep, identity
from baton.store.storage import Storage
from baton.sweep.trials import preparation_name
from tests.support import tiny

REAL = Path(__file__).parents[1] / "assets/tables"
"""One table, as programs in use have written it."""
TABLE = [
    ("Where is the lamp?", "In the attic, beside the shelf."),
    ('He said "where?", again; why?', '"In the cellar", she said; beside\nthe chair.'),
    ("Où est la clé – à côté ?", "Près de l’évier, 5 € l’unité…"),
    ("  padded  ", "=SUM(A1:A3)"),
    ("NA", "null"),
    ("What is 1,000 | 5?", "1.000,5"),
] + [(f"Where is lamp {n}?", f"In room {n}, on the left; or | on the right.") for n in range(30)]


def table(end: str = "\r\n", head: tuple[str, ...] = ("prompt", "completion"), **dialect: Any) -> str:
    """Write the table."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end, **dialect)
    writer.writerow(head)
    writer.writerows(TABLE)
    return text.getvalue()


def add(each: str) -> str:
    """Write the table with a text after each of its records."""
    records = csv.reader(io.StringIO(table(), newline=""))
    text = io.StringIO(newline="")
    for record in records:
        csv.writer(text, lineterminator=f"{each}\r\n").writerow(record)
    return text.getvalue()


def numbered() -> str:
    """Write the table with the rows' numbers in a column without a name."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["", "prompt", "completion"], *([n, *row] for n, row in enumerate(TABLE))])
    return text.getvalue()


SAME: dict[str, tuple[str, Callable[[], bytes]]] = {
    "commas": ("csv", lambda: table().encode()),
    "semicolons": ("csv", lambda: table(delimiter=";").encode()),
    "tabs": ("csv", lambda: table(delimiter="\t").encode()),
    "bars": ("csv", lambda: table(delimiter="|").encode()),
    "all in quotes": ("csv", lambda: table(quoting=csv.QUOTE_ALL).encode("utf-8-sig")),
    "all in quotes, semicolons": ("csv", lambda: table(quoting=csv.QUOTE_ALL, delimiter=";").encode("utf-8-sig")),
    "spaces before quotes": ("csv", lambda: table(quoting=csv.QUOTE_ALL).replace('","', '", "').encode()),
    "Excel's line of the separator": ("csv", lambda: ("sep=;\r\n" + table(delimiter=";")).encode("utf-8-sig")),
    "a separator that is not tried": ("csv", lambda: ("sep=^\n" + table(delimiter="^")).encode()),
    "UTF-16": ("csv", lambda: table(delimiter="\t").encode("utf-16")),
    "UTF-16 with the other end first": ("tsv", lambda: b"\xfe\xff" + table(delimiter="\t").encode("utf-16-be")),
    "carriage returns": ("csv", lambda: table("\r").encode()),
    "carriage returns, semicolons": ("csv", lambda: table("\r", delimiter=";").encode()),
    "empty rows below": ("csv", lambda: (table(delimiter=";") + ";\r\n" * 9).encode()),
    "blank rows below": ("csv", lambda: (table() + " , \r\n" * 9).encode()),
    "empty columns beside": ("csv", lambda: add(",,").encode()),
    "the end of a file of DOS": ("csv", lambda: table().encode() + b"\x1a"),
    "spaces around names": ("csv", lambda: table(head=(" prompt", "completion ")).encode()),
    "numbers of rows": ("csv", lambda: numbered().encode()),
}


def read(path: Path, settings: Csv = readers.AS_IT_IS) -> tuple[list[dict[str, object]], list[str]]:
    """Read a file: its rows, and why others are none."""
    found = list(readers.read(str(path), "line", csv=settings))
    return [x.values for x in found if isinstance(x, SourceRow)], [
        x.reason for x in found if isinstance(x, UnusableRow)
    ]


@pytest.mark.parametrize("name", SAME)
def test_a_table_is_the_same_rows_whoever_writes_it(name: str, tmp_path: Path) -> None:
    suffix, content = SAME[name]
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(content())
    rows, reasons = read(path)
    assert reasons == []
    assert [(row["prompt"], row["completion"]) for row in rows] == TABLE
    assert {key for row in rows for key in row} - {"prompt", "completion"} == (
        {"Unnamed: 0"} if name == "numbers of rows" else set()
    )


HEADS = {
    "a comma in a name in quotes": ('question;"answer, short"\nWhy?;So.\nWho?;Me.\n', ["question", "answer, short"]),
    "a comma in a name": ("question;answer;notes, internal\nWhy?;So.;x\nWho?;Me.;y\n", None),
    "a comma in a name and each row": ("question;answer;notes, internal\nWhy, then?;So.;x\nWho, me?;Me.;y\n", None),
    "a comma in a name of tabs": ("question\tanswer\tnotes, internal\nWhy?\tSo.\tx\n", None),
    "a bar in a name": ("question,answer,notes | internal\nWhy?,So.,x\nWho?,Me.,y\n", ["notes | internal"]),
    "commas in the texts alone": ("question;answer\nWell, why?;So, so.\n", ["question", "answer"]),
    "one column": ("text\nHello.\nYou.\n", ["text"]),
    "rows that end early": ("prompt,completion,notes\nWhy?,So.\n", ["prompt", "completion", "notes"]),
    "no rows": ("prompt;completion\n", None),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_separator_is_found(name: str, tmp_path: Path) -> None:
    content, names = HEADS[name]
    path = tmp_path / "rows.csv"
    path.write_text(content)
    rows, reasons = read(path)
    assert reasons == []
    assert len(rows) == content.count("\n") - 1
    wanted = names or (["question", "answer", "notes, internal"] if rows else [])
    assert all(set(wanted) <= row.keys() for row in rows)
    assert all(row["question"].endswith("?") for row in rows if "question" in row)  # type: ignore[attr-defined]


ENCODED = {"cp1252": "é €", "mac-roman": "é", "utf-16-le": "é", "cp932": "鍵"}


@pytest.mark.parametrize("encoding", ENCODED)
def test_an_encoding_that_is_named_is_read(encoding: str, tmp_path: Path) -> None:
    word = ENCODED[encoding]
    path = tmp_path / "rows.csv"
    path.write_bytes(f"prompt;completion\n{word};{word}, {word}\n".encode(encoding))
    assert read(path, Csv(encoding=encoding)) == ([{"prompt": word, "completion": f"{word}, {word}"}], [])
    assert read(path)[0] != read(path, Csv(encoding=encoding))[0]  # it does not come out right by itself


def test_a_character_that_the_encoding_does_not_have_loses_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,b\n1,\x81\n2,\xe9\n")
    rows, reasons = read(path, Csv(encoding="cp1252"))
    assert rows == [{"a": "2", "b": "é"}]
    assert len(reasons) == 1


def test_a_separator_that_is_named_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\nHello, you.\nYou, too.\n")
    assert read(path)[0] == []
    assert read(path, Csv(delimiter="\t"))[0] == [{"text": "Hello, you."}, {"text": "You, too."}]


RUSSIAN = "a;b\n" + "Где стоит лампа?;Лампа стоит в подвале, за шкафом.\n" * 9
TOLD = {
    "cp1252": (table(delimiter=";").encode("cp1252"), "set data.csv.encoding, maybe to cp1252 (it reads 'Où' then)"),
    "cp1251": (RUSSIAN.encode("cp1251"), "maybe to cp1251 (it reads"),
    "quotes behind backslashes": (b'a,b\n1,"say \\"x\\", ok"\n', 'within quotes twice ("") and not as \\"'),
    "a name twice": (b"a,b,notes,notes\n1,2,3,4\n", "more than one column is called 'notes'; rename one"),
    "texts that are not in quotes": (b"text\nHello, you.\n", "put texts that hold ',' in quotes"),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_table_that_cannot_be_read_says_what_to_do(name: str, tmp_path: Path) -> None:
    content, expected = TOLD[name]
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    reasons = read(path)[1]
    assert any(expected in reason for reason in reasons), reasons
    assert len(set(reasons)) == 1  # and all of them are counted as one


def test_a_table_in_a_text_of_utf_16_is_not_trained_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(table(delimiter="\t").encode("utf-16"))
    assert read(path) == ([], ["a table of text in UTF-16; give its name the ending .tsv"])
    path.write_bytes("Hello.\nYou.\n".encode("utf-16"))
    assert read(path) == ([{"text": "Hello."}, {"text": "You."}], [])


@pytest.mark.parametrize(
    "path", sorted(path for path in REAL.iterdir() if path.suffix != ".json"), ids=lambda path: path.name
)
def test_tables_of_programs_in_use(path: Path) -> None:
    truth = [tuple(row) for row in json.loads((REAL / "truth.json").read_text())]
    rows, reasons = read(path, Csv(encoding="cp1252") if "cp1252" in path.name else readers.AS_IT_IS)
    if path.suffix == ".txt":
        assert (rows, len(reasons)) == ([], 1)
        return
    assert reasons == []
    assert [tuple(row.get(name, row.get(name.title())) for name in ("prompt", "completion")) for row in rows] == truth


WRONG = {
    "a quote as separator": {"delimiter": '"'},
    "two signs": {"delimiter": ";;"},
    "no encoding": {"encoding": "excel"},
    "no encoding of text": {"encoding": "base64"},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        Data.model_validate({"source": "rows.csv", "csv": WRONG[name]})


def test_how_a_table_is_written_is_no_part_of_a_run(tmp_path: Path) -> None:
    plain, set_ = tiny.recipe("org/model"), tiny.recipe("org/model", data={"csv": {"delimiter": ";"}})
    assert set_.data.csv == Csv(delimiter=";")
    assert identity(plain) == identity(set_)
    assert "csv" not in identity(plain)["data"]
    sweep = Sweep(Storage(str(tmp_path)), "s")
    assert preparation_name(sweep, plain) == "s-data-faf0ab03"  # as before there was such a setting
    assert preparation_name(sweep, set_) != preparation_name(sweep, plain)
