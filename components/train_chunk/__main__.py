"""A chunk on a node, under the name in the commands of train jobs made before 2026-11-26."""

import runpy

if __name__ == "__main__":
    runpy.run_module("baton.train", run_name="__main__", alter_sys=True)
