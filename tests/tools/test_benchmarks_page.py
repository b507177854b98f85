"""Pages of benchmarks: written by `make bench ARGS="--publish"`, and current."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.__main__ import main
from benchmarks.table import Chart, Figure, Row, faster

FIGURES = [
    faster("stall", [0.5, 0.25, 1.0], [5.0, 5.0, 5.0], "script", at_least=20),
    Figure(what="extra | all", unit="%", ours=[2.0], at_most=3.5),
]


def _document(name: str, row: Row) -> dict[str, Any]:
    machine = {"processor": "A processor", "cores": 2, "memory": 24 * 2**30}
    about = {"created": "2026-11-23T10:00:00Z", "server": "moto", "machine": machine, "versions": {"torch": "2.13.0"}}
    return {**about, "rows": {name: {**row.to_json(), "seconds": 120.0}}}


def test_rows_are_kept_until_they_are_measured_anew(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "trust").mkdir()
    (tmp_path / "internals").mkdir()
    lines = {"ours": [(30.0, 80.0), (60.0, 90.0)], "script": [(30.0, 40.0), (60.0, 55.0)]}
    first = Row(
        title="useful steps",
        conditions="killed",
        figures=FIGURES,
        notes=["a note"],
        charts={"kills": Chart(title="Useful", unit="%", lines=lines, across="seconds")},
    )
    splits = {"ours": {"import": [3.0, 4.0, 5.0], "fetch": [1.0]}, "script": {"import": [6.0], "tokenize": [2.0]}}
    second = Row(
        title="S3 to memory", conditions="8 M", figures=[], charts={"split": Chart.of_splits("Seconds", splits)}
    )
    published.publish(_document("goodput", first), tmp_path)
    published.publish(_document("boundary", second), tmp_path)

    page = (tmp_path / "internals" / "benchmarks.md").read_text(encoding="utf-8")
    assert "| stall | 0.50 s (0.25–1) | script 5 s (5–5) | 10× (5–20) | ≥ 20× | **no** |" in page
    assert "| extra \\| all | 2% |  |  | ≤ 3.5 % | yes |" in page
    assert "S3 to memory. 8 M." in page
    assert page.index("## boundary") < page.index("## goodput"), "in the order in which they are measured"
    for picture in ("bench-goodput-kills", "bench-boundary-split"):
        assert f"(../pictures/{picture}.svg)" in page
        ET.parse(tmp_path / "pictures" / f"{picture}.svg")

    published.publish(_document("goodput", Row(title="useful steps", conditions="killed twice", figures=[])), tmp_path)
    page = (tmp_path / "internals" / "benchmarks.md").read_text(encoding="utf-8")
    assert "Killed twice." in page
    assert "| stall |" not in page
    assert "## boundary" in page, "other rows stay"


def test_committed_pages_are_current() -> None:
    known = json.loads((published.DOCS / published.FIGURES).read_text(encoding="utf-8"))
    for name, text in published.pages(known).items():
        assert (published.DOCS / name).read_text(encoding="utf-8") == text, "run python -m benchmarks.published"
    assert published.pages(known)["trust/benchmarks.md"].count("\n| [") == len(published.MAIN)


def test_quick_figures_are_not_published(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--quick", "--publish"])
    with pytest.raises(SystemExit):
        main()
    assert "worth publishing" in capsys.readouterr().err
