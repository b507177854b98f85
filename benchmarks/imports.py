"""A process that imports what a chunk imports, and does nothing: `python -m benchmarks.imports NAMES_JSON`."""

import contextlib
import gc
import importlib
import json
import sys

from benchmarks.mark import mark

if __name__ == "__main__":
    from baton.train import imports, lazy_imports

    lazy_imports.defer({**imports.DEFERRED, **imports.UNTRACED})  # else what a chunk loads would load what it does not
    gc.disable()
    with open(sys.argv[1], encoding="utf-8") as names_file:
        names = json.load(names_file)
    for name in names:
        if name not in sys.modules:
            # Some names in `sys.modules` are made by others while they are imported, and are no files.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    with open("/proc/self/status", encoding="ascii") as status_file:
        peak = next(int(line.split()[1]) * 1024 for line in status_file if line.startswith("VmHWM"))
    mark("imported", peak=peak)
