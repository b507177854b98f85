"""What `make dist` builds: a wheel and an sdist that hold all of Baton's files, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from baton.recipe import extras

ROOT = Path(__file__).parents[1]
DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = DOCUMENT["project"]
LISTED = ("constraints.lock", "requirements.lock", "torch-cpu.lock", "CHANGELOG.md")
INPUT = ("baton", "components", "pipelines", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", *LISTED)
GALLERY = {
    "pipelines/recipes/gallery/some-model/recipe.yaml": "name: one\n",
    "pipelines/recipes/gallery/some-model/README.md": "# One\n",
    "components/tokenize/templates/one.jinja": "{{ messages }}",
    "components/tokenize/templates/one.json": "{}",
}
"""Data of the kinds that rooms hold, in folders that are no packages."""


def build(source: Path, output: Path) -> None:
    # As `make dist` does. The folder that a build leaves behind is not to be there: files of before would get in.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=output.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the tree, and the wheel that is built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    for name in INPUT:
        if (ROOT / name).is_dir():
            hidden = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=hidden)
        else:
            shutil.copy(ROOT / name, source)
    for name, text in GALLERY.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    build(source, folder / "dist")
    return folder


def expected(source: Path) -> dict[str, bytes]:
    """Returns what lies in the package and below its two leaf folders, by its path in the import package."""
    return {
        f"{'' if top == 'baton' else 'baton/'}{path.relative_to(source)}": path.read_bytes()
        for top in ("baton", "components", "pipelines")
        for path in (source / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_under_one_name(dist: Path) -> None:
    (wheel,) = (dist / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    ours = {name: content for name, content in files.items() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in ours} == {"baton"}
    # A file of a kind that [tool.setuptools.package-data] does not name would be missing here.
    assert sorted(expected(dist / "source").keys() - ours.keys()) == []
    assert ours == expected(dist / "source")
    assert {name for name in GALLERY if f"baton/{name}" not in ours} == set()
    assert "baton/pipelines/recipes/quickstart.yaml" in ours


def test_the_sdist_holds_files_where_the_tree_has_links(dist: Path) -> None:
    (sdist,) = (dist / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        inside = {member.name.partition("/")[2]: member for member in members}
        assert {member.type for member in members} <= {tarfile.REGTYPE, tarfile.DIRTYPE}
        read = {name: archive.extractfile(member) for name, member in inside.items() if name.startswith("baton/")}
        contents = {name: file.read() for name, file in read.items() if file}
    assert contents == expected(dist / "source")
    assert {"pyproject.toml", "README.md", "LICENSE", *LISTED} <= inside.keys()


def test_the_wheel_of_the_sdist_is_that_of_the_tree(dist: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([*command, str(dist / "source")], check=True, capture_output=True, env=env)
    names = [zipfile.ZipFile(path).namelist() for folder in (dist / "dist", tmp_path) for path in folder.glob("*.whl")]
    assert len(names) == 2
    assert sorted(names[0]) == sorted(names[1])


def test_what_the_lock_pins_lies_in_the_ranges() -> None:
    lines = (ROOT / "constraints.lock").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    groups = [
        PROJECT["dependencies"],
        *PROJECT["optional-dependencies"].values(),
        *DOCUMENT["dependency-groups"].values(),
    ]
    wanted = [Requirement(line) for lines in groups for line in lines]
    outside = [
        f"{need}: {pins.get(need.name.lower())}"
        for need in wanted
        if need.name != "baton-llm" and need.name.lower() in pins and pins[need.name.lower()] not in need.specifier
    ]
    assert outside == []
    assert {need.name for need in wanted} - pins.keys() - {"baton-llm", "types-PyYAML"} == set()


def test_every_range_has_a_lower_end_that_can_be_installed() -> None:
    """`make test-versions` installs it."""
    for line in PROJECT["dependencies"]:
        assert re.fullmatch(r"[a-z0-9-]+>=[\w.]+(,<[\w.]+)?", line), line


def test_every_package_that_a_message_says_an_extra_brings_is_in_it() -> None:
    brought = {
        extra: {Requirement(line).name for line in lines} for extra, lines in PROJECT["optional-dependencies"].items()
    }
    missing = {
        module: extra for module, extra in extras.EXTRAS.items() if module.replace("_", "-") not in brought[extra]
    }
    assert missing == {}
