"""Packages for a machine that has torch, but neither Baton nor a network. Needs the standard library alone.

`python -m tests.gpu.wheels [FOLDER] [--python 3.12]` fetches them into a folder; `install` puts them beside what the
machine has.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-wheels"
SITE = ROOT / "build" / "gpu-site"
COMMIT = "commit.txt"
"""File in the folder with the commit and digest of the tree that fetched it, which may travel without its history."""
LIMIT = 60 * 2**20
"""Bytes that the folder may have."""
FROM_LOCK = (
    "annotated-types", "bitsandbytes", "datasets", "detect-secrets", "dill", "httpcore2", "httpx2", "huggingface-hub",
    "multiprocess", "obstore", "peft", "py3langid", "pydantic", "pydantic-core", "rensa", "transformers", "trl",
    "truststore", "typing-inspection", "zstandard",
)  # fmt: skip
"""Packages that training and its tests import and the machine lacks, or has too old; versions are the lock's."""
THERE = (
    "accelerate", "anyio", "certifi", "charset-normalizer", "click", "execnet", "filelock", "fsspec", "h11", "hf-xet",
    "idna", "iniconfig", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "mpmath", "networkx", "numpy", "packaging",
    "pandas", "pluggy", "psutil", "pyarrow", "pygments", "pytest", "pytest-timeout", "pytest-xdist", "python-dateutil",
    "pyyaml", "regex", "requests", "rich", "safetensors", "setuptools", "shellingham", "six", "sympy", "tokenizers",
    "torch", "tqdm", "typer", "typing-extensions", "urllib3", "xxhash",
)  # fmt: skip
"""Packages that the machine has to have; together with the wheels they are all that the tests import."""
KERNELS = ("liger-kernel",)
"""Packages of the extra `gpu`."""
LIBRARIES = ("cpu", "cuda130")
"""Builds of bitsandbytes that are kept; all take 43 MB."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def requirements() -> list[str]:
    """Returns what has to come, each with its version."""
    with open(ROOT / "constraints.lock", encoding="utf-8") as lines:
        locked = {line.partition("==")[0]: line.strip() for line in lines if "==" in line}
    extra = _project()["optional-dependencies"]["gpu"]
    return [locked[name] for name in FROM_LOCK] + [line for line in extra if line.startswith(KERNELS)]


def fetch(folder: Path, python: str) -> int:
    """Fetches the wheels for a version of Python, and returns their bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "-d", folder, *options, *requirements()], check=True)
    for wheel in folder.glob("bitsandbytes-*.whl"):
        _strip(wheel)
    (folder / COMMIT).write_text(f"{commit()} {tree_digest()}", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > LIMIT:
        raise SystemExit(f"{folder} has {size / 2**20:.0f} MiB, at most {LIMIT / 2**20:.0f} may travel.")
    return size


def _strip(wheel: Path) -> None:
    """Removes the builds for other devices from bitsandbytes' wheel."""
    kept = tuple(f"libbitsandbytes_{name}.so" for name in LIBRARIES)
    whole = wheel.with_suffix(".whole")
    wheel.rename(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            if not entry.filename.endswith(".so") or entry.filename.endswith(kept):
                new.writestr(entry, _record(old, kept) if entry.filename.endswith("/RECORD") else old.read(entry))
    whole.unlink()


def _record(wheel: zipfile.ZipFile, kept: tuple[str, ...]) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith("/RECORD"))
    lines = wheel.read(name).decode().splitlines(keepends=True)
    return "".join(line for line in lines if ".so," not in line or line.partition(",")[0].endswith(kept))


def commit(folder: Path = FOLDER) -> str:
    """Returns the commit of this tree, `-dirty` with changes; of a tree that travelled, where it was fetched for."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        here = git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        here = "unknown"
    noted = folder / COMMIT
    if here.endswith(("-dirty", "unknown")) and noted.exists():
        name, _, digest = noted.read_text(encoding="utf-8").partition(" ")
        return name if digest == tree_digest() else here
    return here


def tree_digest() -> str:
    """Returns a digest of the code of this tree."""
    whole = hashlib.sha256()
    for path in sorted(path for folder in ("baton", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")):
        whole.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return whole.hexdigest()


def install(folder: Path = FOLDER, site: Path = SITE) -> Path:
    """Installs the wheels of a folder and this tree's name and version into a folder for PYTHONPATH, once."""
    wheels = sorted(str(path) for path in folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"{folder} has no wheels. Where there is a network: python -m tests.gpu.wheels {folder}")
    if not (done := site / ".installed").exists():
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", site]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *wheels], check=True)
        name_tree(site)
        done.touch()
    return site


def name_tree(site: Path) -> None:
    """Writes this tree's name and version into a folder for PYTHONPATH, as an installation would."""
    project = _project()
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(about, encoding="utf-8")


def _project() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.wheels")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--python", default="3.12", help="version of Python of that machine (%(default)s)")
    given = parser.parse_args()
    size = fetch(given.folder, given.python)
    print(f"{given.folder}: {size / 2**20:.1f} MiB, {len(os.listdir(given.folder))} wheels")


if __name__ == "__main__":
    main()
