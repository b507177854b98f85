"""A path with a mistake in any of its parts."""

from pathlib import Path

import pytest

from baton.errors import suggest_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("data/row.jsonl", "data/rows.jsonl"),
        ("dta/rows.jsonl", "data/rows.jsonl"),
        ("./dtaa/rowss.json", "./data/rows.jsonl"),
        ("data/rows.jsonl", None),
        ("other/thing", None),
        ("../nothing-like-it-here", None),
    ],
)
def test_near_path(path: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()

    assert suggest_path(path, ["/nowhere", str(tmp_path)]) == expected


def test_an_absolute_one(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    assert suggest_path(f"{tmp_path}/row.csv", ["/"]) == f"{tmp_path}/rows.csv"
