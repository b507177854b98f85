"""The locks: a digest for each file, from no place of its own; and each package that is imported is declared."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from images.requirements import read, select

ROOT = Path(__file__).parents[1]
DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = DOCUMENT["project"]
PINS = {
    lock: [line for line in (ROOT / lock).read_text(encoding="utf-8").splitlines() if "==" in line]
    for lock in ("requirements.lock", "constraints.lock", "torch-cpu.lock")
}


@pytest.mark.parametrize("lock", ["requirements.lock", "torch-cpu.lock"])
def test_it_has_a_digest_for_each_package_and_names_no_place(lock: str) -> None:
    blocks = read(str(ROOT / lock))
    assert len(blocks) == len(PINS[lock])
    digests = r"( \\\n    --hash=sha256:[0-9a-f]{64})+\n(    # .*\n)*"
    assert [block for block in blocks if not re.fullmatch(r"[a-z0-9-]+==[\w.+!]+" + digests, block)] == []
    assert not re.search(r"^ *-|://", "".join(blocks).replace("    --hash=", ""), re.MULTILINE)


def test_the_three_locks_name_the_same_versions() -> None:
    versions = [line.removesuffix(" \\") for line in PINS["requirements.lock"]]
    assert len(versions) > 300
    assert versions == PINS["constraints.lock"]
    (torch,) = (line for line in versions if line.startswith("torch=="))
    assert PINS["torch-cpu.lock"] == [f"{torch}+cpu \\"]


def test_cuda_comes_with_one_build_of_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cpu, cuda = ({block.partition("==")[0] for block in _blocks(select(["."], cpu=each))} for each in (True, False))
    assert cpu < cuda
    assert {name for name in cuda - cpu if not name.startswith(("nvidia-", "cuda-"))} == {"triton"}
    assert "torch==2.13.0+cpu " in select(["."], cpu=True)


def _blocks(selection: str) -> list[str]:
    return [line for line in selection.splitlines() if "==" in line]


OPTIONAL = {
    "xllamacpp": "an export is read with it where somebody has installed it",
    **dict.fromkeys(("atheris", "greenlet", "pytorch_lightning", "runai_model_streamer"), "the Makefile pins it"),
}
"""Module that no extra brings → why."""
SHIPPED = ("baton", "components", "pipelines")
ROOMS = (*SHIPPED, "benchmarks", "images", "tests", "tools")


def _imports() -> dict[tuple[str, bool], list[str]]:
    """Returns for each module, of neither Python nor this tree, where the wheel and where the rest imports it."""
    places: dict[tuple[str, bool], list[str]] = {}
    files = [path for room in ROOMS for path in (ROOT / room).glob("**/*.py")]
    own = {*ROOMS, *(path.stem for path in files)}
    for path in files:
        room = path.relative_to(ROOT).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    names = [module]
                case _:
                    continue
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
                if name not in own or name in DISTRIBUTIONS:
                    places.setdefault((name, room in SHIPPED), []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


DISTRIBUTIONS = {name: found for name, found in packages_distributions().items() if found != ["baton-llm"]}
IMPORTS = _imports()


@pytest.mark.parametrize(("module", "shipped"), sorted(place for place in IMPORTS if place[0] not in OPTIONAL))
def test_each_import_is_declared(module: str, shipped: bool) -> None:
    groups = dict(PROJECT["optional-dependencies"])
    if shipped:  # no user has it
        del groups["dev"]
    lines = [*PROJECT["dependencies"], *(line for group in groups.values() for line in group)]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    if module not in DISTRIBUTIONS:
        pytest.skip(f"{module} is of an extra that is not installed here")
    assert {canonicalize_name(name) for name in DISTRIBUTIONS[module]} & declared, IMPORTS[module, shipped]


@pytest.mark.parametrize("module", ["requests", "urllib3", "yaml", "botocore", "huggingface_hub"])
def test_the_imports_are_seen(module: str) -> None:
    assert IMPORTS[module, True]


def test_actions_are_named_by_commit() -> None:
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / "examples" / "ci" / "github.yml"]
    uses = [line for file in files for line in re.findall(r"uses: (.*)", file.read_text(encoding="utf-8"))]
    commits = {line.partition("@")[0]: line for line in uses}
    assert len(commits) == 12
    assert [line for line in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    assert {line for line in uses if commits[line.partition("@")[0]] != line} == set()
