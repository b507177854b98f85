"""How `baton` starts: what it imports, in which locale, and for a user who has neither name nor home."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BATON = Path(sys.executable).with_name("baton")
HEAVY = ("datasets", "kfp", "kubernetes", "matplotlib", "mlflow", "numpy", "torch", "transformers")
"""Packages that take a while to import, and that most commands do without."""
LIGHT = {
    "help": ["--help"],
    "help of a command": ["submit", "--help"],
    "help of data": ["data", "check", "--help"],
    "recipes": ["recipes", "list"],
    "a page's path": ["data", "check", "rows.jsonl", "--report", "page.pdf"],
    "another page's path": ["data", "show", "recipe.yaml", "--page", "nowhere/page.html"],
    "a recipe that is not there": ["validate", "nowhere.yaml"],
    "a recipe with a mistake": ["compile", "recipe.yaml", "-o", "x.yaml", "--set", "training.epoch=1"],
    "runs": ["runs", "list", "--store", "store"],
}
"""Name → a command line that needs none of them."""
RUN = """
import sys
sys.argv = ["baton", *sys.argv[1:]]
from baton.__main__ import main
try:
    main()
except SystemExit:
    pass
import json
sys.__stderr__.write("\\n" + json.dumps(sorted(sys.modules)))
"""


BESIDE_A_CLONE = {
    "as a module": ["-m", "baton", "--version"],
    "a library in a line": ["-c", "import baton.runs.run; print('baton', baton.runs.run.__file__)"],
    "a script": ["script.py"],
}
"""Name → arguments of Python, in a folder that holds one named baton."""


@pytest.mark.parametrize("arguments", BESIDE_A_CLONE.values(), ids=BESIDE_A_CLONE)
def test_a_folder_named_baton_hides_nothing(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "baton/runs").mkdir(parents=True)
    (tmp_path / "script.py").write_text("import baton.runs.run\nprint('baton')\n", encoding="utf-8")
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:5]) == (0, "baton"), done.stderr


@pytest.fixture
def here(tmp_path: Path, scratch_recipe: dict[str, Any]) -> Path:
    """A folder with a recipe and rows."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(30)), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(json.dumps(scratch_recipe), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("words", LIGHT.values(), ids=LIGHT)
def test_what_a_command_has_no_use_for_is_not_imported(words: list[str], here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=here, capture_output=True, text=True, encoding="utf-8", check=True
    )
    imported = json.loads(done.stderr.rpartition("\n")[2])
    assert "typer" in imported, "the command has run"
    assert [name for name in HEAVY if name in imported] == []


OLD = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""The environment in which Python takes all text for ASCII."""
NAMED = {
    "a store": (["runs", "list", "--store", "störe"], ""),
    "a recipe": (
        ["ci-report", "schön.yaml", "--id", "x", "--store", "störe"],
        "/störe/models/tiny/outcomes/x.json does not",
    ),
    "a folder that is not there": (["validate", "für/immer.yaml"], "baton: recipe 'für/immer.yaml' is not a file."),
    "a name that is no text": (["validate", b"f\xfcr.yaml"], r"baton: recipe 'f\udcfcr.yaml' is not a file"),
}
"""Name → a command line, and what it says where it ends with an error."""


@pytest.mark.parametrize("environment", [{}, OLD], ids=["UTF-8", "C"])
@pytest.mark.parametrize(("words", "told"), NAMED.values(), ids=NAMED)
def test_a_name_with_an_umlaut_is_one_in_any_locale(
    words: list[str | bytes], told: str, environment: dict[str, str], here: Path
) -> None:
    shutil.copy(here / "recipe.yaml", here / "schön.yaml")
    (here / "störe").mkdir(exist_ok=True)
    done = subprocess.run(
        [BATON, *words], cwd=here, env=os.environ | environment, capture_output=True, encoding="utf-8", check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if told else 0), done.stderr
    assert told in done.stderr


AS_ANOTHER = """
for path in $KEEP; do mkdir -p "$KEPT$path"; mount --bind "$path" "$KEPT$path"; done
for path in $CLOSED; do mount -t tmpfs -o mode=755 tmpfs "$path"; done
for path in $KEEP; do mkdir -p "$path"; mount --bind "$KEPT$path" "$path"; done
exec setpriv --reuid 12345 --regid 0 --clear-groups "$@"
"""
"""Runs a command as a user id that nobody has, who sees what this process's Python needs."""
HOMES = {
    "root": {"HOME": "/"},
    "not there": {"HOME": "/nonexistent"},
    "none": {},
    "empty": {"HOME": ""},
    "another's": {"HOME": "/usr"},
    "caches of his own": {"HOME": "/", "XDG_CACHE_HOME": "{own}"},
}
LOOK = """
import os
from baton import machine
machine.settle_home()
os.makedirs(machine.cache_dir(), exist_ok=True)
open(os.path.join(machine.cache_dir(), "x"), "w").close()
os.makedirs(os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "library"), exist_ok=True)
print(machine.cache_dir())
"""


@pytest.fixture
def own() -> Iterator[Path]:
    """A folder that any user can reach and write to."""
    if os.geteuid() or not (shutil.which("setpriv") and shutil.which("unshare")):
        pytest.skip("only root can run a command as another user")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody have mounts of its own")
    with tempfile.TemporaryDirectory(prefix="baton-anyone-") as folder:
        for path in (folder, f"{folder}/kept", f"{folder}/tmp"):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, 0o777)
        yield Path(folder)


def _as_another(own: Path, environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    closed = {
        next(iter(shut[::-1]))
        for path in needed
        if (shut := [folder for folder in (path, *path.parents) if not folder.stat().st_mode & stat.S_IXOTH])
    }
    kept = [path for path in needed if any(path.is_relative_to(folder) for folder in closed)]
    mounts = {"CLOSED": " ".join(map(str, closed)), "KEEP": " ".join(map(str, kept)), "KEPT": str(own / "kept")}
    words = [f"{name}={value.format(own=own)}" for name, value in environment.items()]
    clean = ["env", "-i", "PATH=/usr/bin:/bin", f"TMPDIR={own}/tmp", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", *words]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-ec", AS_ANOTHER, "sh", *clean, *command],
        cwd=own,
        env=os.environ | mounts,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_a_user_without_a_home_has_a_folder_for_caches(home: dict[str, str], own: Path) -> None:
    done = _as_another(own, home, sys.executable, "-c", LOOK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(own)), "in the folder for temporary files, or where the user says"
    assert not (own / "~").exists(), "a folder called ~ is nobody's home"


def test_another_users_folder_is_not_taken_for_a_home(own: Path) -> None:
    (own / "tmp/baton-12345").mkdir()  # root's, in a folder that everybody writes to
    done = _as_another(own, {}, sys.executable, "-c", LOOK)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith(f"{own}/tmp/baton-12345")


@pytest.mark.slow
def test_a_user_without_a_home_runs_a_recipe(own: Path, scratch_recipe: dict[str, Any]) -> None:
    scratch_recipe |= {"store": str(own / "store"), "training": {"max_steps": 2, "batch_size": 2}}
    (own / "rows.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(30)), encoding="utf-8")
    (own / "recipe.yaml").write_text(json.dumps(scratch_recipe), encoding="utf-8")
    done = _as_another(own, HOMES["none"], str(BATON), "run", "recipe.yaml", "--run", "r")
    assert done.returncode == 0, done.stderr
    assert (own / "store/runs/r/report.html").is_file()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named_with_its_variable(own: Path, scratch_recipe: dict[str, Any]) -> None:
    scratch_recipe["store"] = str(own / "store")
    (own / "rows.jsonl").write_text('{"text": "row"}\n' * 30, encoding="utf-8")
    (own / "recipe.yaml").write_text(json.dumps(scratch_recipe), encoding="utf-8")
    done = _as_another(own, {"BATON_CACHE": "/usr/x", "BATON_WARM": "0"}, str(BATON), "run", "recipe.yaml")
    assert done.returncode == 2
    assert "baton: '/usr/x' cannot be used: Permission denied. Set BATON_CACHE to a folder" in done.stderr
