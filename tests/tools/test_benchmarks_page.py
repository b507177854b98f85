"""Pages with benchmarks: filled from the committed figures, current, and closed to figures that are no evidence."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published, rows
from benchmarks.__main__ import main
from benchmarks.table import Chart, Figure, Row, faster, share

FIGURES = [
    faster("stall", [0.5, 0.25, 1.0], [5.0, 5.0, 5.0], "script", at_least=20),
    Figure(what="extra | all", unit="%", ours=[2.0], at_most=3.5),
]
README = "before\n\n<!-- bench: main, filled by `make docs` -->\n| old |\n<!-- bench end -->\n\nafter\n"
QUIET: dict[str, Any] = {"commit": "0123abc", "rounds": 5, "machine": {"load": [0.2, 1.0, 2.0]}, "quick": False}


def _row(**fields: Any) -> Row:
    return Row(**{"title": "S3", "conditions": "8 M", "preparation": "neither side", "figures": [], **fields})


def _document(name: str, row: Row, **about: Any) -> dict[str, Any]:
    machine = {"processor": "A processor", "cores": 2, "memory": 24 * 2**30, "load": [0.2, 1.0, 2.0]}
    document = {"created": "2026-11-23T10:00:00Z", "server": "moto", "versions": {"torch": "2.13.0"}, **QUIET}
    measured = {**row.to_json(), "seconds": 120.0, "others": 0.03}
    return {**document, "machine": machine, **about, "rows": {name: measured}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("docs/pictures", "docs/trust", "docs/internals", "docs/guides"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    for name in ("docs/internals/multi-gpu.md", "docs/guides/sweeps-and-forks.md"):
        (tmp_path / name).write_text("no table\n", encoding="utf-8")
    return tmp_path


def _page(root: Path) -> str:
    return (root / "docs/internals/benchmarks.md").read_text(encoding="utf-8")


def test_rows_are_kept_until_they_are_measured_again(root: Path) -> None:
    lines = {"ours": [(30.0, 80.0), (60.0, 90.0)], "script": [(30.0, 40.0), (60.0, 55.0)]}
    first = _row(
        title="useful steps",
        conditions="killed",
        figures=FIGURES,
        notes=["a note"],
        charts={"kills": Chart(title="Useful", unit="%", lines=lines, across="seconds")},
    )
    splits = {"ours": {"import": [3.0, 4.0, 5.0], "fetch": [1.0]}, "script": {"import": [6.0], "restore": [2.0]}}
    second = _row(title="S3 to memory", charts={"split": Chart.of_splits("Seconds", splits)})
    assert published.publish(_document("goodput", first), root) == {}
    assert published.publish(_document("boundary", second), root) == {}

    page = _page(root)
    assert "| stall | 0.500 s (0.250–1) | script 5 s (5–5) | 10× (5–20) | ≥ 20× | **no** |" in page
    assert "| extra \\| all | 2% |  |  | ≤ 3.5 % | yes |" in page
    assert "S3 to memory. 8 M. Preparing data counts on neither side." in page
    assert "load 0.2 before the start, others used 0.03 cores" in page
    assert page.index("## boundary") < page.index("## goodput"), "in the order in which they are measured"
    for chart in ("bench-goodput-kills", "bench-boundary-split"):
        assert f"(../pictures/{chart}.svg)" in page
        ET.parse(root / "docs/pictures" / f"{chart}.svg")

    published.publish(_document("goodput", _row(title="useful steps", conditions="killed twice")), root)
    page = _page(root)
    assert "Killed twice." in page
    assert "| stall |" not in page
    assert "## boundary" in page, "other rows stay"


def test_other_pages_are_filled_from_the_same_figures(root: Path) -> None:
    gap = share("chunk boundary", [3.5, 3.0, 4.0], [5.0, 5.5, 6.0], "script", unit="s")
    published.publish(_document("boundary", _row(figures=[gap])), root)
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("before\n")
    assert readme.endswith("<!-- bench end -->\n\nafter\n")
    assert "| gap between two chunks, 77 M parameters | 3.50 s (3–4) | 5.50 s (5–6) |" in readme
    assert "Commit `0123abc`. Load before the start: 0.2." in readme
    assert "| old |" not in readme


def test_a_page_whose_row_is_not_measured_keeps_its_text(root: Path) -> None:
    published.publish(_document("notice", _row()), root)
    assert (root / "README.md").read_text(encoding="utf-8") == README


def test_committed_pages_are_current() -> None:
    known = json.loads((published.ROOT / published.FIGURES).read_text(encoding="utf-8"))
    pages = published.pages(known)
    assert set(published.FILLED) < set(pages)
    for name, text in pages.items():
        assert (published.ROOT / name).read_text(encoding="utf-8") == text, "run python -m benchmarks.published"


def test_every_missed_goal_has_its_reason() -> None:
    known = json.loads((published.ROOT / published.FIGURES).read_text(encoding="utf-8"))
    missed = {(name, each["what"]) for name, row in known.items() for each in row["figures"] if each["met"] is False}
    assert missed <= {(name, what) for name, reasons in published.MISSES.items() for what in reasons}


def test_the_reason_of_a_missed_goal_has_its_figures(root: Path) -> None:
    figures = [
        Figure(what=what, unit="%", ours=[ours], theirs=[50.0], other="script", at_least=goal)
        for what, ours, goal in (
            ("goodput, a kill every 60 s", 88.0, 90.0),
            ("its bound, a kill every 60 s", 92.0, None),
        )
    ]
    published.publish(_document("goodput", _row(figures=figures)), root)
    page = (root / "docs/trust/benchmarks.md").read_text(encoding="utf-8")
    assert "- [goodput: goodput, a kill every 60 s](../internals/benchmarks.md#goodput): the bound is 92%.\n" in page
    assert page.count("](../internals/benchmarks.md#goodput): ") == 1


def test_every_row_is_published_or_named_as_not_measured() -> None:
    known = json.loads((published.ROOT / published.FIGURES).read_text(encoding="utf-8"))
    page = published.pages(known)["docs/internals/benchmarks.md"]
    measured, _, missing = page.partition("## Not measured yet")
    assert {name for name in rows.ALL if f"\n## {name}\n" in measured} == set(known)
    assert {name for name in rows.ALL if f"\n- {name}: " in missing} == set(rows.ALL) - set(known)


@pytest.mark.parametrize(
    ("about", "row", "reason"),
    [
        pytest.param({"commit": "0123abc-dirty"}, {}, "commit first", id="local changes"),
        pytest.param({"machine": {"load": [1.4, 0.1, 0.1]}}, {}, "load of 1.4 before the start", id="load"),
        pytest.param({"rounds": 4}, {}, "4 rounds, at least 5", id="few rounds"),
        pytest.param({"quick": True}, {}, "--quick", id="quick"),
        pytest.param({}, {"others": 0.3}, "other processes used 0.30 cores", id="others"),
    ],
)
def test_figures_that_are_no_evidence_are_not_published(
    root: Path, about: dict[str, Any], row: dict[str, Any], reason: str
) -> None:
    document = _document("goodput", _row(title="useful steps"))
    document["machine"] |= about.pop("machine", {})
    document |= about
    document["rows"]["goodput"] |= row
    (reasons,) = published.publish(document, root).values()
    assert reason in "; ".join(reasons)
    assert "\n## goodput" not in _page(root)


def test_a_row_that_is_not_evidence_leaves_the_published_one(root: Path) -> None:
    published.publish(_document("goodput", _row(conditions="killed once")), root)
    published.publish(_document("goodput", _row(conditions="killed twice"), commit="0123abc-dirty"), root)
    assert "Killed once." in _page(root)


@pytest.mark.parametrize(
    ("goal", "is_published"),
    [
        pytest.param({"at_least": 95.0}, True, id="raised"),
        pytest.param({"at_least": 80.0}, False, id="lowered"),
        pytest.param({}, False, id="removed"),
        pytest.param({"at_least": 80.0, "was": 90.0}, True, id="lowered, with a word"),
    ],
)
def test_a_goal_is_lowered_only_with_a_word(root: Path, goal: dict[str, float], is_published: bool) -> None:
    def figure(**goal: float) -> Figure:
        return Figure(what="goodput", unit="%", ours=[68.0], theirs=[33.0], other="script", **goal)  # type: ignore[arg-type]

    assert not published.publish(_document("goodput", _row(figures=[figure(at_least=90.0)])), root)
    refused = published.publish(_document("goodput", _row(figures=[figure(**goal)])), root)
    assert (refused == {}) is is_published
    if not is_published:
        assert "was 90: state it in `was`" in "".join(refused["goodput"])
    if "was" in goal:
        overview = (root / "docs/trust/benchmarks.md").read_text(encoding="utf-8")
        assert "- goodput: the goal was 90; it is ≥ 80 %. Measured: 68%." in overview


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--quick"], "--quick measures too little"), (["--rounds", "3"], "3 rounds, at least 5")],
)
def test_publish_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--publish", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert reason in capsys.readouterr().err


def test_only_code_makes_a_tree_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/page.md", "code.py"):
        (tmp_path / name).write_text("one\n", encoding="utf-8")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "README.md").write_text("two\n", encoding="utf-8")
    (tmp_path / "docs/new.md").write_text("two\n", encoding="utf-8")
    assert not published.commit(tmp_path).endswith("-dirty")
    (tmp_path / "new.py").write_text("two\n", encoding="utf-8")
    assert published.commit(tmp_path).endswith("-dirty")
