"""Environments with the lowest or the newest versions that the wheel allows, and what may be said of one."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ENDS = ("lowest", "newest")
EXTRAS = "metrics,sweep"
TOOLS = ("hypothesis", "jsonschema", "moto", "pytest", "pytest-timeout", "pytest-xdist")
"""What the tests need besides, in the lock's versions."""


def requirements(*extras: str) -> list[Requirement]:
    """Returns the direct dependencies, with those of some extras."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def constraints(end: str) -> list[str]:
    """Returns what holds pip to an end: pip has a resolver for the newest versions alone."""
    if end != "lowest":
        return []
    lower = {
        need.name: bound.version
        for need in requirements(*EXTRAS.split(","))
        for bound in need.specifier
        if bound.operator == ">="
    }
    return [f"{name}=={version}" for name, version in sorted(lower.items())]


def tools() -> list[str]:
    """Returns the tests' own requirements, as the lock pins them."""
    lines = (ROOT / "constraints.lock").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    return [f"{name + ('[server]' if name == 'moto' else '')}=={pins[name]}" for name in TOOLS]


def make(end: str, folder: Path, wheel: Path, python: str | None = None) -> Path:
    """Installs a wheel into an environment of its own, and returns its interpreter.

    Args:
        end: `lowest` or `newest`.
        folder: Where; one that is there is filled up.
        wheel: What is installed.
        python: Interpreter that it is of; this one's when left out.
    """
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([python or sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-qq", "--upgrade", "pip"], check=True)
    limits = folder / "constraints.txt"
    limits.write_text("".join(f"{line}\n" for line in constraints(end)), encoding="utf-8")
    # One call: pip resolves all of it together, as whoever installs the wheel would have it.
    pip = [interpreter, "-m", "pip", "install", "-q", "--no-compile", "-c", str(limits)]
    eager = ["--upgrade", "--upgrade-strategy", "eager"]
    subprocess.run([*pip, *eager, f"{wheel}[{EXTRAS}]", *tools()], check=True)
    # The same version of Baton may be there with other content.
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(wheel)], check=True)
    return interpreter


def versions(interpreter: Path) -> dict[str, str]:
    """Returns the installed version of each direct dependency."""
    names = json.dumps([need.name for need in requirements(*EXTRAS.split(","))])
    return _told(
        interpreter,
        "import sys; from importlib.metadata import version",
        f"{{name: version(name) for name in {names}}}",
    )


def computing(interpreter: Path) -> dict[str, str]:
    """Returns the versions of what computes, as fingerprints have them."""
    return _told(interpreter, "from baton.runs.versions import library_versions", "library_versions()")


def _told(interpreter: Path, line: str, expression: str) -> dict[str, str]:
    code = f"import json; {line}; print(json.dumps({expression}))"
    done = subprocess.run([interpreter, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd="/")
    found: dict[str, str] = json.loads(done.stdout)
    return found
