"""Reads a stage's files ahead of its imports.

A chunk imports some three thousand files, and parts of large libraries. Python reads each only after running the
previous one, so disk and processor wait for each other. `images/reads.py` writes a list of the files when an image or
another environment is made; without a list nothing happens.
"""

import os
import sys

# A list per room of stages: a line `OFFSET LENGTH PATH` for each part of a file, in order of use.
FOLDER = f"{sys.prefix}/share/baton/reads"


def start(room: str = "", folder: str = FOLDER) -> int | None:
    """Makes the kernel read the files of a room's list, and returns the process that asks it, None without a list."""
    try:
        with open(f"{folder}/{room}", encoding="utf-8") as file:
            parts = file.read().splitlines()
    except OSError:
        return None
    if sys.platform != "linux" or not parts:
        return None
    process = os.fork()  # a thread would wait for the interpreter's lock at each file
    if process == 0:
        try:
            _read(parts)
        finally:
            os._exit(0)
    return process


def _read(parts: list[str]) -> None:
    for part in parts:
        offset, length, path = part.split(" ", 2)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:  # an image made of this one may lack it
            continue
        os.posix_fadvise(file, int(offset), int(length), os.POSIX_FADV_WILLNEED)
        os.close(file)
