"""A chunk on a node, under the name that train jobs of before 2026-11-26 have in their commands."""

import runpy

if __name__ == "__main__":
    runpy.run_module("baton.train", run_name="__main__", alter_sys=True)
