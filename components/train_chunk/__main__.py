"""A chunk on a node, under the name in the commands of train jobs made before 2026-11-26."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "train_chunk")
    runpy.run_module("baton.kfp.process", run_name="__main__", alter_sys=True)
