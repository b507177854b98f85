"""What depends on the installed packages alone is looked up once, or read where it was written down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COUNT = """
import importlib, importlib.metadata, json, os, pathlib, sys
from baton.train import lazy_imports as known

known.INSTALLED_FILE = pathlib.Path(sys.argv[1])
scans, asked = [], importlib.metadata.packages_distributions
importlib.metadata.packages_distributions = lambda: scans.append("distributions") or asked()
scandir = os.scandir

def seen(path="."):
    if os.path.basename(os.fspath(path)) == "models":
        scans.append("models")
    return scandir(path)

os.scandir = seen
with known.looked_up_once():
    import transformers.models
    import trl
    importlib.import_module("trl.import_utils")
    transformers.utils.import_utils._package_distribution_mapping()
    transformers.LlamaForCausalLM, transformers.models.auto.AutoConfig

def plain(module):
    return {name: sorted(found) for name, found in module._import_structure.items()}, module._class_to_module

found = {"distributions": importlib.metadata.packages_distributions(),
         "trl": sys.modules["trl.import_utils"].PACKAGE_DISTRIBUTION_MAPPING,
         "transformers": plain(transformers), "models": plain(transformers.models)}
print(json.dumps([scans, found], sort_keys=True))
"""
PLAIN = COUNT.replace("with known.looked_up_once():", "if True:")


def told(code: str, file: Path) -> tuple[list[str], dict[str, Any]]:
    """Returns what was looked up in an interpreter of its own, and what libraries know then."""
    ran = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    scans, found = json.loads(ran.stdout)
    return scans, found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    return told(PLAIN, tmp_path_factory.mktemp("plain") / "none.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("known") / "share" / "known.json"
    subprocess.run([sys.executable, "-m", "baton.train.lazy_imports", str(file)], check=True)
    return file


@pytest.mark.slow
def test_it_is_looked_up_once_where_it_is_not_written_down(plain: Any, tmp_path: Path) -> None:
    scans, found = told(COUNT, tmp_path / "none.json")
    assert sorted(plain[0]) == ["distributions"] * 3 + ["models"] * 2, "without it"
    assert sorted(scans) == ["distributions"] * 2 + ["models"], "the last time is the test's own"
    assert found == plain[1]
    assert not list(tmp_path.iterdir()), "written where an environment is made, never by who reads it"


@pytest.mark.slow
def test_what_is_written_down_is_not_looked_up(plain: Any, written: Path) -> None:
    scans, found = told(COUNT, written)
    assert scans == ["distributions"], "the test's own"
    assert found == plain[1]


@pytest.mark.parametrize("change", ["key", "fields", "text"])
@pytest.mark.slow
def test_what_is_not_of_these_packages_is_not_believed(plain: Any, written: Path, tmp_path: Path, change: str) -> None:
    document = json.loads(written.read_text(encoding="utf-8"))
    assert document["models"]
    assert "transformers" in document["distributions"]
    document["models"], document["distributions"] = [], {}
    if change == "key":
        document["key"] = "0" * 64
    elif change == "fields":
        document["more"] = 1
    text = "{" if change == "text" else json.dumps(document)
    other = tmp_path / "other.json"
    other.write_text(text, encoding="utf-8")
    assert told(COUNT, other)[1] == plain[1]


def test_an_environment_that_cannot_be_written_to_does_without(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "baton.train.lazy_imports", str(tmp_path / "taken" / "known.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}/taken/known.json cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


def test_another_distribution_is_another_key(tmp_path: Path) -> None:
    code = "from baton.train import lazy_imports as known; print(known.installed_digest())"
    keys = []
    for name in ("", "late-1.0.dist-info", "late-1.1.dist-info"):
        folder = tmp_path / f"with-{name}"
        (folder / name).mkdir(parents=True)
        path = f"{folder}:{Path.cwd()}"
        ran = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
        keys.append(ran.stdout)
    assert len(set(keys)) == 3
