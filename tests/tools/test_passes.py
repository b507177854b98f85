"""The tests that run today, the time that ends them, and the record of what passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.matrix_table import all_cells
from tests.support import passes, plugin, selection

pytest_plugins = ("pytester",)

CELL = "tests/exactness/test_matrix.py::test_chunks_end_on_the_bits_of_one_run[{}]"
TESTS = [CELL.format(cell.name) for cell in all_cells()]


def test_shares_that_follow_cover_every_test_once() -> None:
    first = 1235
    shares = [[test for test in TESTS if selection.in_share(test, f"{first + turn}/13")] for turn in range(13)]
    assert sorted(test for share in shares for test in share) == sorted(TESTS)
    assert all(len(TESTS) / 30 < len(share) < len(TESTS) / 6 for share in shares), list(map(len, shares))
    assert shares[0] == [test for test in TESTS if selection.in_share(test, f"{first + 13}/13")], "the same again"
    assert shares[0] != shares[1]


def test_pushes_of_equally_many_commits_come_to_each_share() -> None:
    """As thirteen is a prime; of twelve shares, pushes of three commits would come to four."""
    assert {turn % 13 for turn in range(0, 39, 3)} == set(range(13))
    assert len({turn % 12 for turn in range(0, 36, 3)}) == 4


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return selection.importers()


def distances(graph: selection.Graph, *paths: str) -> dict[str, int]:
    return selection.distances(selection.modules_of(paths, graph), graph)


def test_cells_of_a_changed_method_come_first(graph: dict[str, set[str]]) -> None:
    found = distances(graph, "baton/train/methods/grpo.py")
    by_distance = {test: selection.distance(test, found) for test in TESTS}
    near = {test for test, far in by_distance.items() if far == 0}
    assert near == {CELL.format(cell.name) for cell in all_cells() if cell.method == "grpo"}
    assert None not in by_distance.values(), "whatever trains imports all methods"


@pytest.mark.parametrize(
    ("path", "touches"),
    [
        ("baton/train/checkpointer.py", True),
        ("baton/data/builtin/tools.jsonl", True),
        ("components/train_chunk/component.py", False),
        ("baton/kubeflow/submit.py", False),
        ("docs/index.md", False),
        ("tests/exactness/legs.py", True),
        ("tests/exactness/zero_legs.py", False),
        ("tests/exactness/test_matrix.py", True),
        ("tests/exactness/test_kill.py", False),
    ],
)
def test_a_cell_is_touched_by_what_it_imports_alone(path: str, touches: bool, graph: dict[str, set[str]]) -> None:
    assert (selection.ROOT / path).is_file()
    assert (selection.distance(TESTS[0], distances(graph, path)) is not None) == touches


def test_the_nearest_change_counts() -> None:
    graph = {"c": {"b"}, "b": {"a"}, "a": set(), "other": {"b"}, "alone": set()}
    assert selection.distances(["c", "a"], graph) == {"c": 0, "b": 1, "a": 0}
    assert selection.distances([], graph) == {}


SUITE = """
import pytest

@pytest.fixture(scope="module")
def shared():
    yield
    print("cleaned up")

@pytest.mark.parametrize("number", range(3))
def test_quick(number, shared):
    pass

def test_long(shared):
    raise AssertionError("it was not to run")

@pytest.mark.skip(reason="no such machine")
def test_elsewhere():
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the suite with the plugin, on a tree and a record of its own."""
    pytester.makepyfile(test_it=SUITE)
    monkeypatch.setattr(passes, "RUNS", pytester.path / "build" / "passes.jsonl")
    monkeypatch.setattr(passes, "tree_digest", lambda: "tree")
    monkeypatch.setattr(passes, "clean_commit", lambda: "commit")
    monkeypatch.setattr(passes, "load", lambda: {"test_it.py::test_long": {"seconds": 600.0}})
    monkeypatch.setenv("PYTHONPATH", str(passes.ROOT))
    given = ("-p", plugin.__name__, "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    return lambda *options: pytester.runpytest_inprocess(*given, *options)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_test_that_would_end_too_late_is_not_run_and_no_failure(workers: str, run: Any) -> None:
    done = run("-n", workers, "--minutes", "5")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["*not run: the time was over*", "test_it.py: 1", "*3 passed, 1 skipped, 1 not run*"])
    noted = {line["test"]: line.get("skipped") for line in passes.read_runs(passes.RUNS)}
    assert noted == {
        **{f"test_it.py::test_quick[{n}]": None for n in range(3)},
        "test_it.py::test_elsewhere": "no such machine",
    }


def test_in_more_time_it_runs_and_fails(run: Any) -> None:
    assert run("-n", "0", "--minutes", "11").parseoutcomes() == {"failed": 1, "passed": 3, "skipped": 1}


def test_what_passed_on_the_same_tree_is_not_repeated(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("-n", "0").ret == 1
    again = run("-n", "0", "--unpassed")
    assert again.parseoutcomes() == {"failed": 1, "skipped": 1, "deselected": 3}
    assert run("-n", "0", "--unpassed", "-k", "quick").ret == 0, "all have passed"
    monkeypatch.setattr(passes, "tree_digest", lambda: "another")
    assert run("-n", "0", "--unpassed").parseoutcomes() == {"failed": 1, "passed": 3, "skipped": 1}


def test_shares_run_each_test_once(run: Any) -> None:
    counts = [
        run("-n", "0", "--share", f"{turn}/3", "-k", "quick").parseoutcomes().get("passed", 0) for turn in range(3)
    ]
    assert sum(counts) == 3


NEW, OLD, LOST = "c2", "c1", "rebased"
SLOW, QUICK, OTHER, AWAY = "tests/a.py::slow", "tests/a.py::quick[1]", "tests/a.py::quick[2]", "tests/b.py::away"
LISTED = {SLOW: True, QUICK: False, OTHER: False, AWAY: True}


def line(test: str, commit: str | None, hour: int, **more: Any) -> dict[str, Any]:
    given = {"test": test, "commit": commit, "tree": "", "date": f"2026-01-01T{hour:02}:00Z"}
    return {**given, **(more or {"seconds": 1.5})}


def merged(*lines: dict[str, Any], record: passes.Record | None = None) -> passes.Record:
    return passes.merge(record or {}, lines, LISTED, {NEW, OLD})


def test_the_last_pass_on_a_commit_of_this_history_counts() -> None:
    found = merged(line(SLOW, NEW, 2), line(SLOW, OLD, 1), line(SLOW, None, 3), line(SLOW, LOST, 4))
    assert found[SLOW] == {"commit": NEW, "date": "2026-01-01T02:00Z", "seconds": 1.5}
    assert merged(line(SLOW, OLD, 1), record=found)[SLOW] == found[SLOW]
    assert found["tests/a.py"] == found[AWAY] == {}


def test_a_files_quick_tests_count_where_all_passed_on_one_commit() -> None:
    found = merged(line(QUICK, OLD, 1), line(OTHER, OLD, 1), line(QUICK, NEW, 2))
    assert found["tests/a.py"] == {"commit": OLD, "date": "2026-01-01T01:00Z", "seconds": 3.0, "tests": 2}


def test_a_skipped_test_keeps_its_reason_until_it_passes() -> None:
    found = merged(line(AWAY, NEW, 1, skipped="no engine"), line(OTHER, NEW, 1, skipped="no npm"), line(QUICK, NEW, 1))
    assert (found[AWAY], found[OTHER]) == ({"skipped": "no engine"}, {"skipped": "no npm"})
    assert found["tests/a.py"]["tests"] == 1
    passed = merged(line(AWAY, OLD, 2), record=found)
    assert passed[AWAY]["commit"] == OLD
    assert merged(line(AWAY, NEW, 3, skipped="no engine"), record=passed)[AWAY] == passed[AWAY]


def test_a_test_that_is_gone_leaves_the_record() -> None:
    assert merged(record={"tests/a.py::gone": {"commit": OLD}}).keys() == {SLOW, "tests/a.py", AWAY}


def test_a_record_is_written_a_line_an_entry_and_read_as_it_was(tmp_path: Path) -> None:
    found = merged(line(SLOW, NEW, 2), line(AWAY, NEW, 1, skipped="no “engine”"))
    text = passes.dumps(found)
    assert json.loads(text) == found
    assert text.count("\n") == len(found) + 2
    page = passes.markdown(found)
    assert "| tests/a.py | 1 | 0.0 | 2026-01-01, `c2` | 2026-01-01, `c2` |" in page
    assert "| no “engine” | tests/b.py (1) |" in page


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "passes.jsonl"
    first, last = json.dumps(line(SLOW, NEW, 2)), json.dumps(line(AWAY, NEW, 2))
    path.write_text(f"{first}\n{first[:20]}{first}\n{last}\n{first[:20]}", encoding="utf-8")
    assert [found["test"] for found in passes.read_runs(path)] == [SLOW, AWAY]


def test_another_file_makes_another_tree_and_the_record_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(passes, "ROOT", tmp_path)
    passes.git("init", "-q")
    (tmp_path / "code.py").write_text("one")
    before = passes.tree_digest()
    (tmp_path / "tests").mkdir()
    (tmp_path / passes.WRITTEN[0]).write_text("{}")
    assert passes.tree_digest() == before
    (tmp_path / "code.py").write_text("two")
    assert passes.tree_digest() != before
