"""`requirements.lock`: versions alone, which any machine can install; and what is imported is among them."""

import ast
import itertools
import re
import sys
import tomllib
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_it_names_versions_and_no_place() -> None:
    lines = (Path(__file__).parents[1] / "requirements.lock").read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert len(named) > 100
    assert [line for line in named if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.+!-]+", line)] == []


BROUGHT = {
    "aiobotocore": "s3fs",
    "botocore": "aiobotocore",
    "filelock": "torch",
    "huggingface-hub": "transformers",
    "kfp-server-api": "kfp",
    "markupsafe": "jinja2",
    "pydantic-core": "pydantic",
    "requests": "kubernetes",
    "typing-extensions": "pydantic",
    "urllib3": "kubernetes",
}
"""Distribution that is imported and not declared → the one whose interface it is a part of, and which requires it."""
OPTIONAL = {"xllamacpp": "an export is read with it where somebody has installed it"}


def _imports() -> dict[str, list[str]]:
    """Returns where each module is imported that is neither of Python nor of Baton."""
    places: dict[str, list[str]] = {}
    for path in (path for room in ("baton", "components", "pipelines") for path in (ROOT / room).glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    names = [module]
                case _:
                    continue
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"baton"}:
                places.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return places


IMPORTS = _imports()
DISTRIBUTIONS = packages_distributions()


@pytest.mark.parametrize("module", sorted(IMPORTS.keys() - OPTIONAL))
def test_what_is_imported_is_declared_or_brought_by_what_is(module: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *itertools.chain.from_iterable(project["optional-dependencies"].values())]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    known = DISTRIBUTIONS.get(module)
    if known is None:
        pytest.skip(f"{module} is of an extra that is not installed here")
    names = {canonicalize_name(name) for name in known}
    while not names & declared:
        (name,) = names
        assert name in BROUGHT, f"{name} is imported by {IMPORTS[module]} and nobody declares it"
        needed = [Requirement(line) for line in metadata.requires(BROUGHT[name]) or []]
        assert any(canonicalize_name(each.name) == name and each.marker is None for each in needed)
        names = {canonicalize_name(BROUGHT[name])}
