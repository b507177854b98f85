"""The user's Python files travel with the run by their content."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, UserError
from baton.models import user_code
from baton.runs.run import Run
from baton.store.storage import Storage


@pytest.fixture
def run(store: str) -> Run:
    """A run in each kind of store."""
    return Run(Storage(store), "r")


def files(folder: str | None) -> dict[str, str]:
    """Returns the names and contents in a folder."""
    assert folder
    return {path.name: path.read_text() for path in Path(folder).iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of a user's code, with other things beside it."""
    folder = tmp_path / "own"
    (folder / "below").mkdir(parents=True)
    (folder / "rewards.py").write_text("def short(**_): return [1.0]\n")
    (folder / "more.py").write_text("X = 1\n")
    (folder / "notes.txt").write_text("not code")
    (folder / "below" / "deep.py").write_text("Y = 2\n")
    return folder


def test_a_folder_travels_without_what_is_not_code(run: Run, source: Path, tmp_path: Path) -> None:
    user_code.ship(run, str(source))
    assert files(user_code.fetch(run, str(tmp_path / "pod"))) == {
        "rewards.py": "def short(**_): return [1.0]\n",
        "more.py": "X = 1\n",
    }


def test_a_file_travels_alone(run: Run, source: Path, tmp_path: Path) -> None:
    user_code.ship(run, str(source / "more.py"))
    assert files(user_code.fetch(run, str(tmp_path / "pod"))) == {"more.py": "X = 1\n"}


@pytest.mark.parametrize(
    ("below", "expected"), [("", {"a.py": "A = 1\n", "b.py": "B = 1\n"}), ("/b.py", {"b.py": "B = 1\n"})]
)
def test_code_comes_from_the_store_too(below: str, expected: dict[str, str], run: Run, tmp_path: Path) -> None:
    for name, content in (("a.py", b"A = 1\n"), ("b.py", b"B = 1\n"), ("c.txt", b"no")):
        run.storage.write(f"shared/code/{name}", content)
    uri = run.storage.uri("shared/code")
    user_code.ship(run, (uri if "://" in uri else f"file://{uri}") + below)
    assert files(user_code.fetch(run, str(tmp_path / "pod"))) == expected


def test_a_file_that_the_store_does_not_have_is_refused(run: Run) -> None:
    run.storage.write("shared/code/a.py", b"A = 1\n")
    uri = run.storage.uri("shared/code")
    source = (uri if "://" in uri else f"file://{uri}") + "/b.py"
    with pytest.raises(UserError) as caught:
        user_code.ship(run, source)
    assert str(caught.value) == f"hooks.source {source!r} does not exist. Check the address."


def test_no_code_is_noted_nowhere(run: Run, tmp_path: Path) -> None:
    user_code.ship(run, None)
    assert user_code.fetch(run, str(tmp_path / "pod")) is None
    assert run.raw("code.json") is None


def test_the_address_is_that_of_names_and_contents(run: Run, source: Path) -> None:
    """SHA-256 over `name sha256` lines in the order of names."""
    user_code.ship(run, str(source))
    lines = "".join(
        f"{name} {hashlib.sha256((source / name).read_bytes()).hexdigest()}\n" for name in ("more.py", "rewards.py")
    )
    assert run.require("code.json") == {"prefix": f"data/{hashlib.sha256(lines.encode()).hexdigest()}/code"}


def test_the_same_content_is_the_same_code_wherever_it_lies(run: Run, source: Path, tmp_path: Path) -> None:
    user_code.ship(run, str(source))
    noted, held = run.require("code.json"), sorted(run.storage.find("data"))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("more.py", "rewards.py"):
        (moved / name).write_bytes((source / name).read_bytes())
    user_code.ship(run, str(moved))
    assert run.require("code.json") == noted
    assert sorted(run.storage.find("data")) == held


def _edit(folder: Path) -> None:
    (folder / "more.py").write_text("X = 2\n")


def _rename(folder: Path) -> None:
    (folder / "more.py").rename(folder / "other.py")


def _add(folder: Path) -> None:
    (folder / "new.py").write_text("")


@pytest.mark.parametrize("change", [_edit, _rename, _add])
def test_a_run_does_not_go_on_with_other_code(change: Any, run: Run, source: Path, tmp_path: Path) -> None:
    user_code.ship(run, str(source))
    change(source)
    with pytest.raises(UserError, match=r"run 'r' has another code\.json"):
        user_code.ship(run, str(source))
    assert files(user_code.fetch(run, str(tmp_path / "pod")))["more.py"] == "X = 1\n"


NOTHING = {
    "absent": ("absent", "is not a Python file or folder. Check the path."),
    "another type": ("own/notes.txt", "is not a Python file or folder. Check the path."),
    "a folder of other things": ("empty", "holds no Python file. Name a .py file or its folder."),
}


@pytest.mark.parametrize(("name", "message"), NOTHING.values(), ids=NOTHING)
def test_what_holds_no_code_is_refused(name: str, message: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = Run(Storage(str(tmp_path / "store")), "r")
    with pytest.raises(UserError) as caught:
        user_code.ship(run, str(tmp_path / name))
    assert str(caught.value) == f"hooks.source {str(tmp_path / name)!r} {message}"
    assert run.raw("code.json") is None


def test_code_that_is_gone_is_said_to_be(run: Run, source: Path, tmp_path: Path) -> None:
    user_code.ship(run, str(source))
    for path in list(run.storage.find("data")):
        run.storage.remove(f"data/{path}")
    with pytest.raises(BatonError, match=r"is gone\. Run the data-split stage again"):
        user_code.fetch(run, str(tmp_path / "pod"))


def test_what_is_installed_can_be_imported(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (source / "installed_by_test.py").write_text("VALUE = 17\n")
    user_code.install(None)
    user_code.install(str(source))
    user_code.install(str(source))
    assert sys.path.count(str(source)) == 1
    namespace: dict[str, Any] = {}
    exec("from installed_by_test import VALUE", namespace)
    assert namespace["VALUE"] == 17
