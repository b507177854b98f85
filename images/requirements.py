"""Writes what an image installs: the runtime requirements of pyproject.toml, and the lock as constraints.

    python3 images/requirements.py [EXTRA…]

reads pyproject.toml and requirements.lock in the working directory and writes requirements.txt and constraints.txt
beside them. Needs nothing but Python 3.11.
"""

import sys
import tomllib


def main(extras: list[str]) -> None:
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    known = project["optional-dependencies"]
    if unknown := sorted(set(extras) - set(known)):
        raise SystemExit(f"EXTRAS names {', '.join(unknown)}; pyproject.toml has {', '.join(known)}")
    wanted = [*project["dependencies"], *(line for extra in dict.fromkeys(extras) for line in known[extra])]
    with open("requirements.lock", encoding="utf-8") as file:
        locked = [line for line in file if line[0].isalnum()]
    with open("requirements.txt", "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in wanted)
    with open("constraints.txt", "w", encoding="utf-8") as file:
        file.writelines(locked)


if __name__ == "__main__":
    main(sys.argv[1:])
