"""A train-chunk as it is, but for where it stages: `python -m benchmarks.chunk FOLDER RECORD RUN_URI INDEX`.

A chunk that is killed leaves its folder in memory. In a pod that goes with the pod; here the measuring process has to
know where to look. RECORD is a file for the names of the modules that the chunk had imported at its end, or `-`.
"""

import atexit
import json
import runpy
import sys


def _record(path: str) -> None:
    from baton.train import lazy_imports

    ours = ("__main__", "benchmarks", "tests")
    names = [name for name in sys.modules if not lazy_imports.is_waiting(name) and not name.startswith(ours)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(names, file)


if __name__ == "__main__":
    from baton.checkpoint import staging

    folder, record = sys.argv[1:3]
    staging.MEMORY = folder
    if record != "-":
        atexit.register(_record, record)
    sys.argv[1:3] = ["train_chunk"]
    runpy.run_module("baton.kfp.process", run_name="__main__", alter_sys=True)
