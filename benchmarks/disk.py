"""What the disk needs for what a chunk reads while it starts: run in a pod, as the text of a command.

`python3 -c TEXT LIST THREADS` reads all parts of a list, as `images/reads.py` writes it, and prints the seconds and the
bytes.
"""

import json
import os
import sys
import threading
import time


def _read(parts: list[list[str]], sizes: list[int]) -> None:
    for offset, length, path in parts:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no more than was asked for
        begin = int(offset)
        while begin < int(offset) + int(length) and (read := os.pread(file, int(offset) + int(length) - begin, begin)):
            begin += len(read)
        sizes.append(begin - int(offset))
        os.close(file)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as lines:
        listed = [line.rstrip("\n").split(" ", 2) for line in lines]
    count, read = int(sys.argv[2]), list[int]()
    threads = [threading.Thread(target=_read, args=(listed[at::count], read)) for at in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"mark": "read", "seconds": time.perf_counter() - began, "bytes": sum(read)}), flush=True)
