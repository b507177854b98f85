"""Selects from requirements.lock what an environment installs, each file with its digest.

    python3 images/requirements.py . metrics sweep > requirements.txt
    pip install --require-hashes -r requirements.txt

Arguments are extras and dependency groups of pyproject.toml; `.` stands for the project's own dependencies. Files are
read in the working directory. torch comes in the CPU build of torch-cpu.lock, without CUDA, where pip finds it or has
installed it; with the extra `gpu` never. Needs Python 3.11 and pip alone.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

CUDA = re.compile(r"(cuda|nvidia)-|triton$")


def main(names: list[str]) -> None:
    print(select(names, cpu="gpu" not in names and cpu_offered()))


def select(names: list[str], cpu: bool) -> str:
    """Returns the part of the lock that some extras and groups need, with torch's CPU build or with PyPI's."""
    document = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    known = {".": project["dependencies"], **project["optional-dependencies"], **document.get("dependency-groups", {})}
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"EXTRAS names {', '.join(unknown)}; pyproject.toml has {', '.join(known)}")
    queue = []
    while names:
        for line in known[(name := names[0])]:
            if line.startswith(project["name"] + "["):  # an extra that names others
                names = [*names, *re.split(r"[][,]", line)[1:-1]]
            else:
                queue.append(canonical(line))
        names = [each for each in names if each != name]
    # Name of a package → its block of the lock, and the packages that the block says it is there for.
    blocks = {block.partition("==")[0]: block for block in read("requirements.lock")}
    via = {name: set(re.findall(r"^    #(?: via)?  *(\S+)$", block, re.MULTILINE)) for name, block in blocks.items()}
    wanted: set[str] = set()
    while queue:
        if (name := queue.pop()) not in wanted:
            wanted.add(name)
            queue += (
                each for each in blocks if name in via[each] and not (cpu and name == "torch" and CUDA.match(each))
            )
    if missing := sorted(wanted - blocks.keys()):
        raise SystemExit(f"requirements.lock lacks {', '.join(missing)}, which pyproject.toml asks for: run make lock.")
    if cpu:
        blocks["torch"] = "".join(read("torch-cpu.lock"))
    return "".join(blocks[name] for name in sorted(wanted))


def read(lock: str) -> list[str]:
    """Returns the blocks of a lock, one for each package."""
    return re.findall(r"^[a-z0-9].*\n(?:    .*\n)*", Path(lock).read_text(encoding="utf-8"), re.MULTILINE)


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def cpu_offered() -> bool:
    """Returns whether pip has installed the CPU build of torch, or finds it: it would prefer that build to PyPI's.

    With digests of both builds pip prefers the one whose index tells its digest.
    """
    version = read("torch-cpu.lock")[0].split()[0].removeprefix("torch==")
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    return version in re.split(r"[\s,]+", asked.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
