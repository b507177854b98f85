"""Installs requirements.lock into the environment of this interpreter, and shows how far it is: `make setup`.

    .venv/bin/python tools/install.py requirements.lock

From the environment: TORCH=cpu takes the CPU build of torch, from TORCH_INDEX (torch's own index when left out).
On Linux the build on PyPI adds CUDA. Needs pip alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LARGE = re.compile(r"\s*Downloading (\S+) \((\d{2,}\.?\d* MB|[\d.]+ GB)\)")
STEP = 20  # packages for each line where output is no terminal


def main(lock: str) -> None:
    pins = re.findall(r"^[A-Za-z0-9][^\s;#]*==[^\s;]+", Path(lock).read_text(encoding="utf-8"), re.MULTILINE)
    torch, index = os.environ.get("TORCH", ""), os.environ.get("TORCH_INDEX") or CPU_INDEX
    if torch not in ("", "cpu"):
        raise SystemExit(f"make setup: TORCH={torch!r}; expected cpu, or nothing for the build on PyPI.")
    print(f"Installing {len(pins)} packages of {lock} into {sys.prefix}, a few minutes: about 3 GB.")
    if torch == "cpu":
        pin = next(pin for pin in pins if pin.startswith("torch=="))
        if pip(1, "--upgrade", "--no-deps", "--retries", "1", "--timeout", "20", "--index-url", index, pin):
            raise SystemExit(
                f"make setup: {index} is out of reach, or has no {pin}. Name a mirror of torch's CPU index in "
                "TORCH_INDEX, or leave out TORCH=cpu."
            )
    elif sys.platform == "linux":
        print("PyPI's torch adds about 4 GB of CUDA on Linux; `make setup TORCH=cpu` leaves it out.")
    if code := pip(len(pins), "-r", lock):
        raise SystemExit(code)


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
    main(sys.argv[1])
