"""Files that a stage reads while it starts, asked of the disk before they are needed.

What a chunk imports lies in some three thousand files, and in libraries of which it uses a part. Python reads one
after the other, each when the one before has run, so that disk and processor wait for each other. Where an environment
is made, such as an image, a list of them is written (`images/reads.py`); without a list nothing happens.
"""

import os
import sys

FOLDER = f"{sys.prefix}/share/baton/reads"
"""Holds a list per room of stages: a line `OFFSET LENGTH PATH` for each part of a file, in the order of its use."""


def start(room: str = "", folder: str = FOLDER) -> int | None:
    """Lets the kernel read the files of a room's list, from a process beside this one.

    Not a thread: it would wait for the interpreter's lock at each file.

    Returns:
        Number of that process; None where there is no list.
    """
    try:
        with open(f"{folder}/{room}", encoding="utf-8") as file:
            parts = file.read().splitlines()
    except OSError:
        return None
    if sys.platform != "linux" or not parts:
        return None
    process = os.fork()
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
