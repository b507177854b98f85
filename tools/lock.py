"""Resolves pyproject.toml into requirements.lock, with the digest of each file, and constraints.lock: `make lock`.

    python -m tools.lock [--upgrade] [--upgrade-package NAME]

Pins that are in the lock stay, unless an option of pip-compile moves them. requirements.lock has all extras and groups;
images/requirements.py selects from it. Its digests are those of PyPI's files for this Python on Linux. torch-cpu.lock
has the CPU build of its torch, from TORCH_INDEX (torch's own index when left out). constraints.lock has the versions
alone, for pip's option --constraint.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

from images.requirements import read
from tools.install import CPU_INDEX

TAGS = {(tag.interpreter, tag.abi) for tag in sys_tags()}
PLATFORM = re.compile(r"any$|(many)?linux.*_(x86_64|aarch64)$")
HEADER = "# Written by make lock"


def main(options: list[str]) -> None:
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    text = resolve(options)
    pins = re.findall(r"^[a-z0-9].*==.*$", text, re.MULTILINE)
    with ThreadPoolExecutor(8) as threads:
        files = dict(zip(pins, threads.map(lambda pin: locked(pin, published(index, pin)), pins), strict=True))
    cpu = cpu_build(next(pin for pin in pins if pin.startswith("torch==")))
    hashed = re.sub(r"^[a-z0-9].*==.*$", lambda found: files[found[0]], text, flags=re.MULTILINE)
    Path("requirements.lock").write_text(f"{HEADER}, from pyproject.toml.\n{hashed}", encoding="utf-8")
    Path("torch-cpu.lock").write_text(f"{HEADER}: torch's CPU build, from {CPU_INDEX}.\n{cpu}\n", encoding="utf-8")
    versions = "\n".join(pins)
    Path("constraints.lock").write_text(f"{HEADER}: versions of requirements.lock.\n{versions}\n", encoding="utf-8")


def resolve(options: list[str]) -> str:
    """Returns the pins with what each is there for, from the one index."""
    document = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    groups = [*project["optional-dependencies"].values(), *document.get("dependency-groups", {}).values()]
    wanted = [*project["dependencies"], *(line for group in groups for line in group)]
    lines = "\n".join(line for line in wanted if not line.startswith(project["name"]))
    own = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT")
    env = {key: value for key, value in os.environ.items() if key not in own} | {"PIP_CONFIG_FILE": os.devnull}
    with tempfile.TemporaryDirectory() as folder:
        if Path("constraints.lock").exists():
            shutil.copy("constraints.lock", Path(folder) / "requirements.lock")
        subprocess.run(
            [sys.executable, "-m", "piptools", "compile", "--quiet", "--strip-extras", "--no-emit-options",
             "--no-header", "--allow-unsafe", "--output-file", "requirements.lock", *options, "-"],
            cwd=folder, env=env, input=lines, text=True, check=True,
        )  # fmt: skip
        text = (Path(folder) / "requirements.lock").read_text(encoding="utf-8")
    return re.sub(r"-r -$", "pyproject.toml", text, flags=re.MULTILINE)


def published(index: str, pin: str) -> dict[str, str]:
    """Returns the name and the SHA-256 of each file of a package, as an index lists them."""
    request = urllib.request.Request(
        f"{index.rstrip('/')}/{pin.partition('==')[0]}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return {file["filename"]: file["hashes"].get("sha256", "") for file in json.load(answer)["files"]}


def locked(pin: str, files: dict[str, str]) -> str:
    """Returns the lines that pin a package by the digests of those files that this Python can install on Linux."""
    digests = sorted(digest for name, digest in files.items() if digest and fits(pin.partition("==")[2], name))
    if not digests:
        raise SystemExit(f"make lock: the index lists no file with a SHA-256 for {pin}.")
    return " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in digests)])


def fits(version: str, file: str) -> bool:
    try:
        if not file.endswith(".whl"):
            return str(parse_sdist_filename(file)[1]) == version
        _, found, _, tags = parse_wheel_filename(file)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return False
    return str(found) == version and any((t.interpreter, t.abi) in TAGS and PLATFORM.match(t.platform) for t in tags)


def cpu_build(pin: str) -> str:
    """Returns the lines that pin torch's CPU build; those that are there, where its index is out of reach."""
    index = os.environ.get("TORCH_INDEX") or CPU_INDEX
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=60) as answer:
            links = re.findall(r"([^/\"]+)#sha256=([0-9a-f]{64})", answer.read().decode())
    except OSError as error:
        (present,) = read("torch-cpu.lock")
        if present.startswith(f"{pin}+cpu "):
            return present.rstrip("\n")
        raise SystemExit(
            f"make lock: {index} is out of reach ({error}), and torch-cpu.lock has no {pin}+cpu. Name a mirror of "
            "torch's CPU index in TORCH_INDEX."
        ) from None
    return locked(f"{pin}+cpu", {urllib.parse.unquote(name): digest for name, digest in links})


if __name__ == "__main__":
    main(sys.argv[1:])
