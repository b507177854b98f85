"""The executor, under the name in the commands of pipelines compiled before 2026-11-26."""

import runpy

if __name__ == "__main__":
    runpy.run_module("baton.kfp.executor", run_name="__main__", alter_sys=True)
