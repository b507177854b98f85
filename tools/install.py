"""Installs what requirements.lock pins into the environment of this interpreter, and shows how far it is: `make setup`.

    .venv/bin/python -m tools.install

Every file has to have a digest of the lock. From the environment: TORCH=cpu takes the CPU build of torch, from
TORCH_INDEX (torch's own index when left out). On Linux the build on PyPI adds CUDA. Needs pip alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from images.requirements import cpu_offered, read, select

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LARGE = re.compile(r"\s*Downloading (\S+) \((\d{2,}\.?\d* MB|[\d.]+ GB)\)")
STEP = 20  # packages for each line where output is no terminal


def main() -> None:
    torch, index = os.environ.get("TORCH", ""), os.environ.get("TORCH_INDEX") or CPU_INDEX
    if torch not in ("", "cpu"):
        raise SystemExit(f"make setup: TORCH={torch!r}; expected cpu, or nothing for the build on PyPI.")
    # The pip that Python 3.11 brings takes half as long again.
    if code := install(select(["installer"], cpu=False)):
        raise SystemExit(code)
    cpu = torch == "cpu" or cpu_offered()
    wanted = select([".", "dev"], cpu=cpu)
    print(
        f"Installing {wanted.count('==')} packages of requirements.lock into {sys.prefix}, a few minutes: about 3 GB."
    )
    if torch == "cpu":
        pin = read("torch-cpu.lock")[0]
        options = ("--upgrade", "--no-deps", "--retries", "1", "--timeout", "20", "--index-url", index)
        if install(pin, *options):
            raise SystemExit(
                f"make setup: {index} is out of reach, or has no {pin.split()[0]} with a digest of torch-cpu.lock. "
                "Name a mirror of torch's CPU index in TORCH_INDEX, or leave out TORCH=cpu."
            )
    elif not cpu and sys.platform == "linux":
        print("PyPI's torch adds about 4 GB of CUDA on Linux; `make setup TORCH=cpu` leaves it out.")
    if code := install(wanted):
        raise SystemExit(code)


def install(pins: str, *arguments: str) -> int:
    """Installs packages by their digests, and returns pip's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text(pins, encoding="utf-8")
        return pip(pins.count("=="), "--require-hashes", "-r", str(file), *arguments)


def pip(packages: int, *arguments: str) -> int:
    """Runs `pip install`, and prints one line that counts packages; large files with their size."""
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *arguments]
    # With another index beside it, PyPI's newest build would win.
    environment = {key: value for key, value in os.environ.items() if key != "PIP_EXTRA_INDEX_URL"}
    shown = os.environ if "--index-url" not in arguments else environment
    seen = 0
    # Warnings of pip are shown where it fails.
    with tempfile.TemporaryFile("w+") as warnings:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=warnings, text=True, env=shown) as process:
            for line in process.stdout or ():
                if large := LARGE.match(line):
                    _tell(f"  {large[1]}, {large[2]}")
                elif line.startswith("Collecting "):
                    seen += 1
                    if sys.stdout.isatty():
                        print(f"\r\033[K  {seen} of {packages}: {line.split()[1]}", end="", flush=True)
                    elif seen % STEP == 0:
                        _tell(f"  {seen} of {packages} packages")
                elif line.startswith("Installing collected"):
                    _tell("  unpacking")
        if process.returncode:
            warnings.seek(0)
            sys.stderr.write(warnings.read())
    return process.returncode


def _tell(text: str) -> None:
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


if __name__ == "__main__":
    main()
