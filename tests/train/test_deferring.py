"""Packages that are loaded when something of them is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = {
    "__init__.py": "from late.parts import Part\nfrom late import settings\nloads = 1\nrun = None\n",
    "parts.py": "class Part:\n    def __init__(self, n=0):\n        self.n = n\nclass Child(Part):\n    pass\n"
    "def twice(n):\n    return 2 * n\n",
    "settings.py": "strict = False\nloose = True\n",
}
BEGIN = """
import sys
from baton.train import lazy_imports as deferring
from baton.train.lazy_imports import LazySpec as Contents
told = []
deferring.defer({"late": Contents(
    frozenset({"Part", "twice"}), made=frozenset({"Child"}), modules=frozenset({"settings"}), values={"run": None},
    loaded=told.append)})
"""


@pytest.fixture
def late(tmp_path: Path) -> Path:
    folder = tmp_path / "late"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(late: Path, code: str) -> None:
    """Runs code in an interpreter of its own, after the package was deferred."""
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + code], env={"PYTHONPATH": f"{late}:{Path.cwd()}"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


USES = {
    "names, values and modules": "from late.parts import Part, twice, Child; import late; assert late.run is None;"
    "assert late.settings.__name__ == 'late.settings'; Child(3)",
    "instances of others": "from late import Part; assert not isinstance(3, Part); assert not issubclass(int, Part)",
    "comparison with others": "from late import Part; assert Part != int; assert Part not in (int, str)",
    "unions": "from late import Part\ndef f(a: Part | None, b: str | Part | int): pass\n"
    "union = str | (Part | int)\nassert isinstance(3, union) and not isinstance(3.0, union | bytes)",
    "what is set": "import late.settings as settings; settings.strict = True",
    "a search for it": "import importlib.util, late; assert importlib.util.find_spec('late').origin.endswith('.py')",
}


@pytest.mark.parametrize("code", USES.values(), ids=USES)
def test_these_load_nothing(late: Path, code: str) -> None:
    run(late, f"{code}\nassert deferring.is_waiting('late') and not told")


LOADS = {
    "a call": "from late.parts import twice; assert twice(4) == 8",
    "another attribute": "import late; assert late.loads == 1",
    "a base": "from late import Part\nclass Own(Part):\n    pass\nassert Own(3).n == 3 and isinstance(Own(), Part)",
    "an attribute of a class": "from late import Part; assert Part.__init__",
    "a name that may be its": "from late import Part\nclass Other:\n    pass\nOther.__name__ = 'Part'\n"
    "assert not isinstance(Other(), Part)",
    "what was made": "from late.parts import Child; child = Child(5); assert deferring.is_waiting('late'); "
    "assert child.n == 5; import late.parts; assert isinstance(child, late.parts.Part) and child == child",
    "a union that is looked into": "from late import Part; import typing; own = int | (Part | None) | str\n"
    "kinds = typing.get_args(own); import late.parts\nassert kinds == (int, late.parts.Part, type(None), str)",
    "an instance of a union": "from late import Part; union = int | Part; import late.parts\n"
    "class Own(Part):\n    pass\nassert isinstance(Own(), union) and union == int | late.parts.Part",
}


@pytest.mark.parametrize("code", LOADS.values(), ids=LOADS)
def test_these_load_it_whole(late: Path, code: str) -> None:
    run(late, f"{code}\nimport late\nassert late.loads == 1 and not deferring.is_waiting('late') and told == [late]")


def test_modules_that_were_handed_out_stand_for_its_own(late: Path) -> None:
    run(
        late,
        "import late, late.parts as parts\nfrom late.parts import Part\nlate.loads\nimport late.parts as own\n"
        "assert type(own) is type(sys) and parts.Part is own.Part and isinstance(own.Child(), Part)\n"
        "parts.settings = None\nassert late.parts is own",
    )


def test_its_modules_are_run_in_the_order_in_which_it_imports_them(late: Path) -> None:
    # `parts` needs what the package has first, as a circle of imports does that is entered at the right place.
    (late / "late" / "__init__.py").write_text("first = 1\nfrom late.parts import Part\nloads = 1\n", encoding="utf-8")
    (late / "late" / "inner").mkdir()
    (late / "late" / "inner" / "__init__.py").write_text("from late.inner.deep import one\n", encoding="utf-8")
    (late / "late" / "inner" / "deep.py").write_text("import late.parts\none = late.first\n", encoding="utf-8")
    text = "from late.inner.deep import one\nclass Part:\n    size = one\n"
    (late / "late" / "parts.py").write_text(text, encoding="utf-8")
    run(late, "from late.inner.deep import Part as unused\nfrom late.parts import Part\nassert Part.size == 1")


def test_what_others_have_set_stays_set(late: Path) -> None:
    run(
        late,
        "import late.settings as settings\nsettings.strict = True\nassert settings.loose and settings.strict is True",
    )


def test_a_package_that_is_imported_already_stays_as_it_is(late: Path) -> None:
    run(late, "import json\ndeferring.defer({'json': Contents()})\nassert not deferring.is_waiting('json')")


def test_a_missing_package_is_missing(late: Path) -> None:
    run(
        late,
        "deferring.defer({'absent': Contents()})\nimport importlib.util\n"
        "assert importlib.util.find_spec('absent') is None\n"
        "try:\n    import absent\nexcept ImportError:\n    pass\nelse:\n    raise AssertionError",
    )


def test_an_error_in_it_is_its_importers_own_and_comes_again(late: Path) -> None:
    (late / "late" / "parts.py").write_text("raise OSError('no such device')", encoding="utf-8")
    run(
        late,
        "import late\nfor _ in range(2):\n    try:\n        late.loads\n    except OSError as error:\n"
        "        assert str(error) == 'no such device'\n    else:\n        raise AssertionError",
    )
